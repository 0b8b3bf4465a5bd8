"""Requests that may be repeated: what a key has made once, it never makes twice.

A row says which id a request will use before anything is made under it, so a server that is
killed at any line, and asked again, finds what it made, or knows under which id to make it.
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

from smokebox.engine.record.schema import connect, fault
from smokebox.errors import Conflict, InvalidOption, NotFound, SmokeboxError
from smokebox.wire import IDEMPOTENCY_KEY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.server.call import Call

P = ParamSpec("P")
T = TypeVar("T")

# What is kept of requests: for so long, and so many of each principal.
KEPT_SECONDS = 24 * 3600.0
MOST_KEPT = 10_000

_KEY = re.compile(r"[ -~]{1,255}")
_PRUNE_EVERY = 64
# `place` and `id` name what is made; of two claims on one name the later counts.
_TABLE = """
    CREATE TABLE IF NOT EXISTS requests (
        principal TEXT NOT NULL, key TEXT NOT NULL, fingerprint BLOB NOT NULL,
        place TEXT NOT NULL, id TEXT NOT NULL, made INTEGER NOT NULL, created_at REAL NOT NULL,
        PRIMARY KEY (principal, key), UNIQUE (place, id)
    )
"""
_INDEX = "CREATE INDEX IF NOT EXISTS requests_by_age ON requests (principal, created_at)"


class Row(NamedTuple):
    """What is known of a request that had a key."""

    fingerprint: bytes
    id: str
    made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Making(Generic[T]):
    """What a request makes: under which id, how, and how it is found again.

    `find` raises `NotFound` for what is not there. What does not last ends with the server,
    and is made again for a request that is repeated after that.
    """

    kind: str
    id: str
    find: Callable[[str], Awaitable[T]]
    make: Callable[[str], Awaitable[T]]
    lasts: bool = True


class Requests:
    """The requests to a server that had an `Idempotency-Key`, in a file of their own."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        # One thread, which is the lock of the connection too.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="smokebox-requests")
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()
        self._claims = 0

    @classmethod
    async def open(cls, home: str) -> Self:
        """Those of a state directory that is ours."""
        path = os.path.join(home, "server.db")
        return cls(path, await asyncio.to_thread(_open, path))

    async def once(self, call: Call, body: object, making: Making[T]) -> T:
        """What a request makes, or has made before. Those at the same time are one.

        Raises `Conflict` for a name that is taken, or a key that another request had.
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
                # Another key may have claimed the name while this one waited for it.
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

    async def _found(self, making: Making[T], row: Row | None, id: str) -> T | None:
        """What a repeated request has made, if it has."""
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

    def _get(self, owner: str, key: str) -> Row | None:
        row = self._connection.execute(
            "SELECT fingerprint, id, made FROM requests WHERE principal = ? AND key = ?",
            (owner, key),
        ).fetchone()
        return None if row is None else Row(row[0], row[1], bool(row[2]))

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
    """The error for a name that something else has."""
    return Conflict(
        f"there is a {kind} {id!r} already.",
        hint="Use another id, or leave it out for one that is free.",
        kind=kind,
        name=id,
    )


def _open(path: str) -> sqlite3.Connection:
    connection = connect(path)
    try:
        connection.execute(_TABLE)
        connection.execute(_INDEX)
    except sqlite3.Error as error:
        connection.close()
        raise fault(error, path) from error
    return connection


def _key(call: Call) -> str | None:
    key = call.request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidOption(
            f"the header Idempotency-Key is 1 to 255 printable ASCII characters, not {key!r:.80}.",
            hint="Send a random one, such as a UUID, for each thing to make.",
            option=IDEMPOTENCY_KEY,
            value=key,
        )
    return key


def _fingerprint(call: Call, body: object) -> bytes:
    scope = call.request.scope
    content = msgspec.json.encode(body, order="sorted")
    told = f"{scope['method']} {scope['path']}\n".encode("utf-8", "surrogateescape")
    return hashlib.sha256(told + content).digest()


def _another(key: str) -> Conflict:
    return Conflict(
        f"the Idempotency-Key {key!r} was sent with another request.",
        hint="Repeat that request as it was, or send a key of its own with each.",
        kind="idempotency key",
        name=key,
    )


def _gone(kind: str, id: str) -> NotFound:
    return NotFound(
        f"this request has made the {kind} {id!r}, which is no more.",
        hint="Send another Idempotency-Key to make another.",
        kind=kind,
        name=id,
    )
