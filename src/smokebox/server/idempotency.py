"""Idempotent creation: requests with the same idempotency key create one object.

A row stores the id of the object before it is created, so after a crash at any point a retry finds
the object, or the id to create it with.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar, TypeVarTuple, Unpack
from weakref import WeakValueDictionary

import msgspec

from smokebox.errors import Conflict, InvalidOption, NotFound, SmokeboxError
from smokebox.foundation.storage import DatabaseFormat, DatabaseWriter
from smokebox.wire import IDEMPOTENCY_KEY

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Awaitable, Callable

    from smokebox.server.endpoint import ApiCall

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# How long, and how many, rows of each principal are kept.
KEPT_SECONDS = 24 * 3600.0
MOST_KEPT = 10_000

_KEY = re.compile(r"[ -~]{1,255}")
_PRUNE_EVERY = 64

REQUEST_STORE = DatabaseFormat(
    label="idempotency store",
    # "SMKI"
    application_id=0x534D4B49,
    migrations=(
        (
            # `place` and `id` identify the object; of two claims on one, the later counts.
            """
            CREATE TABLE IF NOT EXISTS requests (
                principal TEXT NOT NULL, key TEXT NOT NULL, fingerprint BLOB NOT NULL,
                place TEXT NOT NULL, id TEXT NOT NULL,
                made INTEGER NOT NULL, created_at REAL NOT NULL,
                PRIMARY KEY (principal, key), UNIQUE (place, id)
            )
            """,
            "CREATE INDEX IF NOT EXISTS requests_by_age ON requests (principal, created_at)",
        ),
    ),
    unmarked_table="requests",
    synchronous="NORMAL",
    busy_seconds=5.0,
    repair_hint=lambda _: "Move it away: an empty one is created.",
)


class ClaimRow(NamedTuple):
    """The stored claim of a request with an idempotency key."""

    fingerprint: bytes
    id: str
    created: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation(Generic[T]):
    """An object to create: its id, and functions to find it and to create it.

    `find` raises `NotFound` if it does not exist. An object that is not `durable` ends with the
    server; a later retry of the request creates it again.
    """

    kind: str
    id: str
    find: Callable[[str], Awaitable[T]]
    create: Callable[[str], Awaitable[T]]
    durable: bool = True


class IdempotencyStore:
    """Requests with an `Idempotency-Key`, in an SQLite file."""

    def __init__(self, writer: DatabaseWriter) -> None:
        self._writer = writer
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()
        self._claims = 0

    @classmethod
    async def open(cls, home: str) -> Self:
        """Open the store of a state directory that this process owns."""
        path = os.path.join(home, "server.db")
        connection = await asyncio.to_thread(REQUEST_STORE.open, path)
        return cls(
            DatabaseWriter(
                connection,
                name="smokebox-requests",
                translate=lambda error: REQUEST_STORE.translate(error, path),
            )
        )

    async def once(self, call: ApiCall, body: object, creation: Creation[T]) -> T:
        """Create an object, or return the one that an earlier request with the same key created.

        Raises `Conflict` for an id that is taken, or a key that was used for another request.
        """
        place = str(call.request.scope["path"])
        key = _key(call)
        if key is None:
            async with self._lock("place", place, creation.id):
                return await creation.create(creation.id)
        owner, fingerprint = call.principal.id, _fingerprint(call, body)
        async with self._lock("key", owner, key):
            claim = await self._run(_find_claim, owner, key)
            if claim is not None and claim.fingerprint != fingerprint:
                raise _key_reused(key)
            id = creation.id if claim is None else claim.id
            async with self._lock("place", place, id):
                # Another key may have claimed the id while this one waited for the lock.
                claim = claim and await self._run(_find_claim, owner, key)
                if (found := await _find_created(creation, claim, id)) is not None:
                    await self._run(_mark_created, owner, key)
                    return found
                if self._claims % _PRUNE_EVERY == 0:
                    await self._run(_prune, owner)
                self._claims += 1
                await self._run(_claim, owner, key, fingerprint, place, id)
                try:
                    created = await creation.create(id)
                except SmokeboxError as error:
                    if not error.retryable:
                        await self._run(_delete_claim, owner, key)
                    raise
                await self._run(_mark_created, owner, key)
                return created

    async def aclose(self) -> None:
        """Close the file."""
        await asyncio.to_thread(self._writer.close)

    def _lock(self, *name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _run(
        self, job: Callable[[sqlite3.Connection, Unpack[Ts]], T], *arguments: *Ts
    ) -> asyncio.Future[T]:
        return self._writer.submit(lambda connection: job(connection, *arguments))


async def _find_created(creation: Creation[T], claim: ClaimRow | None, id: str) -> T | None:
    """Return the object that a repeated request has created, if there is one."""
    try:
        found = await creation.find(id)
    except NotFound:
        if claim is not None and claim.created and creation.durable:
            raise _removed(creation.kind, id) from None
        return None
    if claim is None:
        raise taken(creation.kind, id)
    return found


def _find_claim(connection: sqlite3.Connection, owner: str, key: str) -> ClaimRow | None:
    row = connection.execute(
        "SELECT fingerprint, id, made FROM requests WHERE principal = ? AND key = ?", (owner, key)
    ).fetchone()
    return None if row is None else ClaimRow(row[0], row[1], bool(row[2]))


def _claim(
    connection: sqlite3.Connection,
    owner: str,
    key: str,
    fingerprint: bytes,
    place: str,
    id: str,
) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, 0, ?)",
        (owner, key, fingerprint, place, id, time.time()),
    )


def _mark_created(connection: sqlite3.Connection, owner: str, key: str) -> None:
    connection.execute("UPDATE requests SET made = 1 WHERE principal = ? AND key = ?", (owner, key))


def _delete_claim(connection: sqlite3.Connection, owner: str, key: str) -> None:
    connection.execute("DELETE FROM requests WHERE principal = ? AND key = ?", (owner, key))


def _prune(connection: sqlite3.Connection, owner: str) -> None:
    connection.execute("DELETE FROM requests WHERE created_at < ?", (time.time() - KEPT_SECONDS,))
    connection.execute(
        "DELETE FROM requests WHERE principal = ? AND created_at <= (SELECT created_at FROM "
        "requests WHERE principal = ? ORDER BY created_at DESC LIMIT 1 OFFSET ?)",
        (owner, owner, MOST_KEPT),
    )


def taken(kind: str, id: str) -> Conflict:
    """Return the error for an id that is taken."""
    return Conflict(
        f"there is a {kind} {id!r} already.",
        hint="Use another id, or leave it out for a random one.",
        kind=kind,
        name=id,
    )


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


def _key_reused(key: str) -> Conflict:
    return Conflict(
        f"the Idempotency-Key {key!r} was sent with another request.",
        hint="Repeat that request unchanged, or send a different key with each request.",
        kind="idempotency key",
        name=key,
    )


def _removed(kind: str, id: str) -> NotFound:
    return NotFound(
        f"the {kind} {id!r} that this request created does not exist any more.",
        hint="Send another Idempotency-Key to create another.",
        kind=kind,
        name=id,
    )
