"""Idempotent creation: requests with the same idempotency key create one object.

A row stores the id of the object before it is created, so after a crash at any point a retry finds
the object, or the id to create it with.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, ParamSpec, Self, TypeVar
from weakref import WeakValueDictionary

import msgspec

from smokebox.engine.record.schema import RECORD, fault
from smokebox.errors import Conflict, InvalidOption, NotFound, SmokeboxError
from smokebox.wire import IDEMPOTENCY_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.server.endpoint import ApiCall

P = ParamSpec("P")
T = TypeVar("T")

# How long, and how many, rows of each principal are kept.
KEPT_SECONDS = 24 * 3600.0
MOST_KEPT = 10_000

_KEY = re.compile(r"[ -~]{1,255}")
_PRUNE_EVERY = 64
# `place` and `id` identify the object; of two claims on one, the later counts.
_TABLE = """
    CREATE TABLE IF NOT EXISTS requests (
        principal TEXT NOT NULL, key TEXT NOT NULL, fingerprint BLOB NOT NULL,
        place TEXT NOT NULL, id TEXT NOT NULL, made INTEGER NOT NULL, created_at REAL NOT NULL,
        PRIMARY KEY (principal, key), UNIQUE (place, id)
    )
"""
_INDEX = "CREATE INDEX IF NOT EXISTS requests_by_age ON requests (principal, created_at)"


class ClaimRow(NamedTuple):
    """The stored claim of a request with an idempotency key."""

    fingerprint: bytes
    id: str
    made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation(Generic[T]):
    """An object to create: its id, and functions to create it and to find it again.

    `find` raises `NotFound` if it does not exist. An object that does not last ends with the
    server; a later retry of the request creates it again.
    """

    kind: str
    id: str
    find: Callable[[str], Awaitable[T]]
    make: Callable[[str], Awaitable[T]]
    lasts: bool = True


class IdempotencyStore:
    """Requests with an `Idempotency-Key`, in an SQLite file."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        # A single thread, which also serializes use of the connection.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="smokebox-requests")
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()
        self._claims = 0

    @classmethod
    async def open(cls, home: str) -> Self:
        """Open the store of a state directory that this process owns."""
        path = os.path.join(home, "server.db")
        return cls(path, await asyncio.to_thread(_open, path))

    async def once(self, call: ApiCall, body: object, making: Creation[T]) -> T:
        """Create an object, or return the one that an earlier request with the same key created.

        Raises `Conflict` for an id that is taken, or a key that was used for another request.
        """
        place = str(call.request.scope["path"])
        key = _key(call)
        if key is None:
            async with self._lock("place", place, making.id):
                return await making.make(making.id)
        owner, mark = call.principal.id, _fingerprint(call, body)
        async with self._lock("key", owner, key):
            row = await self._run(self._get, owner, key)
            if row is not None and row.fingerprint != mark:
                raise _another(key)
            id = making.id if row is None else row.id
            async with self._lock("place", place, id):
                # Another key may have claimed the id while this one waited for the lock.
                row = row and await self._run(self._get, owner, key)
                if (found := await self._found(making, row, id)) is not None:
                    await self._run(self._mark_made, owner, key)
                    return found
                await self._run(self._claim, owner, key, mark, place, id)
                try:
                    made = await making.make(id)
                except SmokeboxError as error:
                    if not error.retryable:
                        await self._run(self._forget, owner, key)
                    raise
                await self._run(self._mark_made, owner, key)
                return made

    async def aclose(self) -> None:
        """Close the file."""
        await self._run(self._connection.close)
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _found(self, making: Creation[T], row: ClaimRow | None, id: str) -> T | None:
        """Return the object that a repeated request has created, if there is one."""
        try:
            found = await making.find(id)
        except NotFound:
            if row is not None and row.made and making.lasts:
                raise _gone(making.kind, id) from None
            return None
        if row is None:
            raise taken(making.kind, id)
        return found

    def _lock(self, *name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._thread, functools.partial(work, *arguments, **named)
            )
        except sqlite3.Error as error:
            raise fault(error, self._path) from error

    def _get(self, owner: str, key: str) -> ClaimRow | None:
        row = self._connection.execute(
            "SELECT fingerprint, id, made FROM requests WHERE principal = ? AND key = ?",
            (owner, key),
        ).fetchone()
        return None if row is None else ClaimRow(row[0], row[1], bool(row[2]))

    def _claim(self, owner: str, key: str, mark: bytes, place: str, id: str) -> None:
        if self._claims % _PRUNE_EVERY == 0:
            self._prune(owner)
        self._claims += 1
        self._connection.execute(
            "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, 0, ?)",
            (owner, key, mark, place, id, time.time()),
        )

    def _mark_made(self, owner: str, key: str) -> None:
        self._connection.execute(
            "UPDATE requests SET made = 1 WHERE principal = ? AND key = ?", (owner, key)
        )

    def _forget(self, owner: str, key: str) -> None:
        self._connection.execute(
            "DELETE FROM requests WHERE principal = ? AND key = ?", (owner, key)
        )

    def _prune(self, owner: str) -> None:
        self._connection.execute(
            "DELETE FROM requests WHERE created_at < ?", (time.time() - KEPT_SECONDS,)
        )
        self._connection.execute(
            "DELETE FROM requests WHERE principal = ? AND created_at <= (SELECT created_at FROM "
            "requests WHERE principal = ? ORDER BY created_at DESC LIMIT 1 OFFSET ?)",
            (owner, owner, MOST_KEPT),
        )


def taken(kind: str, id: str) -> Conflict:
    """Make the error for an id that is taken."""
    return Conflict(
        f"there is a {kind} {id!r} already.",
        hint="Use another id, or leave it out for a random one.",
        kind=kind,
        name=id,
    )


def _open(path: str) -> sqlite3.Connection:
    connection = RECORD.connect(path)
    try:
        connection.execute(_TABLE)
        connection.execute(_INDEX)
    except sqlite3.Error as error:
        connection.close()
        raise fault(error, path) from error
    return connection


def _key(call: ApiCall) -> str | None:
    key = call.request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidOption(
            f"the header Idempotency-Key is 1 to 255 printable ASCII characters, not {key!r:.80}.",
            hint="Send a random one, such as a UUID, for each object to create.",
            option=IDEMPOTENCY_KEY,
            value=key,
        )
    return key


def _fingerprint(call: ApiCall, body: object) -> bytes:
    scope = call.request.scope
    content = msgspec.json.encode(body, order="sorted")
    target = f"{scope['method']} {scope['path']}\n".encode("utf-8", "surrogateescape")
    return hashlib.sha256(target + content).digest()


def _another(key: str) -> Conflict:
    return Conflict(
        f"the Idempotency-Key {key!r} was sent with another request.",
        hint="Repeat that request unchanged, or send a different key with each request.",
        kind="idempotency key",
        name=key,
    )


def _gone(kind: str, id: str) -> NotFound:
    return NotFound(
        f"the {kind} {id!r} that this request created does not exist any more.",
        hint="Send another Idempotency-Key to create another.",
        kind=kind,
        name=id,
    )
