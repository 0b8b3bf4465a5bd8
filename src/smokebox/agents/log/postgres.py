"""Sessions in a Postgres database, for agents on several hosts.

A writer holds an advisory lock, which the server takes back when the connection ends: a killed
process loses its sessions at once, a host that vanished after half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import time
from typing import TYPE_CHECKING

from smokebox.agents.log import postgres_tables as sql
from smokebox.agents.log.postgres_pool import PostgresPool
from smokebox.agents.log.records import VERSION, StoredRecord, decode, encode
from smokebox.agents.log.sqlite_tables import summary
from smokebox.agents.log.store import (
    SessionKey,
    SessionSummary,
    busy,
    change_of,
    fenced,
    has_forks,
    no_blob,
)
from smokebox.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from smokebox.agents.log.records import Record
    from smokebox.agents.log.store import LogChange

# How often a follower looks although it was told of nothing.
_POLL = 5.0
_RETRY = 0.1
_PAGE = 500
# Waits between the attempts of an append while the server is away.
_AWAY = (0.1, 0.5, 1.0, 2.0, 4.0)
# A blob is put before the record that names it.
_UNUSED_SECONDS = 3600.0


class PostgresWriter:
    """The right to add to one session of a database."""

    def __init__(
        self, pool: PostgresPool, key: SessionKey, *, number: int, epoch: int, head: int
    ) -> None:
        self._pool = pool
        self._key = key
        self._number = number
        self._epoch = epoch
        self._head = head
        self._turn = asyncio.Lock()
        self._released = False

    @property
    def key(self) -> SessionKey:
        """Which session."""
        return self._key

    @property
    def head(self) -> int:
        """The offset of the last record, 0 before the first."""
        return self._head

    async def append(self, records: Sequence[Record]) -> int:
        """Add records, all or none; they are durable when it returns the new head."""
        if self._released:
            raise fenced(self._key)
        rows = [encode(record).decode() for record in records]
        return await asyncio.shield(asyncio.ensure_future(self._append(rows, change_of(records))))

    async def release(self) -> None:
        """Give the right back. Safe to repeat."""
        async with self._turn:
            if self._released:
                return
            self._released = True
            # A server that is away has forgotten the lock.
            with contextlib.suppress(ServiceUnavailable):
                await self._pool.fetch(sql.FORGET_EMPTY, self._number, self._epoch)
                await self._pool.unlock(self._number)

    async def _append(self, rows: list[str], change: LogChange) -> int:
        async with self._turn:
            for wait in (*_AWAY, None):
                try:
                    return await self._append_once(rows, change)
                except ServiceUnavailable:
                    if wait is None:
                        raise
                    await asyncio.sleep(wait)
            raise AssertionError("the last attempt returns or raises")

    async def _append_once(self, rows: list[str], change: LogChange) -> int:
        await self._pool.hold()
        added = await self._pool.fetch(
            sql.APPEND,
            self._number,
            self._epoch,
            self._head,
            rows,
            time.time(),
            change.unfinished,
            change.parent,
            change.forked_from,
            VERSION,
            list(change.blobs),
            sql.CHANNEL,
            token(self._key),
        )
        if added:
            self._head = added[0]["head"]
            return self._head
        # Nobody but us moves the head of our epoch: an answer was lost, and all is well.
        found = await self._pool.fetch(sql.HEAD, self._number, self._epoch)
        if found and found[0]["head"] == self._head + len(rows):
            self._head += len(rows)
            return self._head
        raise fenced(self._key)


class PostgresStore:
    """A store in a database. Used in one event loop; connects when it is first used.

    The URL must lead to the server itself: a pooler that shares connections between
    transactions loses locks and notifications.
    """

    def __init__(self, url: str) -> None:
        self._pool = PostgresPool(url)

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> PostgresWriter:
        """Become the writer of a session, which need not be there yet."""
        deadline = time.monotonic() + wait
        names = (key.agent, key.id, key.session)
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        while True:
            await self._pool.fetch(sql.MAKE, *names, time.time())
            rows = await self._pool.fetch(sql.OWNER, *names)
            if not rows:
                continue
            number = rows[0]["number"]
            if await self._pool.lock(number):
                taken = await self._pool.fetch(sql.TAKE, number, owner)
                if taken:
                    epoch, head = taken[0]
                    return PostgresWriter(self._pool, key, number=number, epoch=epoch, head=head)
                await self._pool.unlock(number)
            elif time.monotonic() >= deadline:
                raise busy(key, rows[0]["owner"] or "another process")
            else:
                await asyncio.sleep(_RETRY)

    async def read(
        self, key: SessionKey, *, after: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Records behind an offset, in order; none for a session that is not there."""
        rows = await self._pool.fetch(sql.READ, key.agent, key.id, key.session, after, limit)
        where = f"session {key}"
        return [
            StoredRecord(place, at, decode(data.encode(), version, where=where))
            for place, at, version, data in rows
        ]

    async def follow(
        self, key: SessionKey, *, after: int = 0
    ) -> AsyncGenerator[StoredRecord, None]:
        """Records behind an offset, then those that are added."""
        followed: int | None = None
        with self._pool.wakes.listen(token(key)) as more:
            while not self._pool.closed:
                await self._pool.hold()
                more.clear()
                found = await self._pool.fetch(sql.FIND, key.agent, key.id, key.session)
                number, head = found[0] if found else (None, 0)
                if followed is not None and number != followed:
                    return
                # One without records may vanish before it has any.
                followed = number if head else None
                if head > after:
                    for stored in await self.read(key, after=after, limit=_PAGE):
                        yield stored
                        after = stored.offset
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL):
                            await more.wait()

    async def sessions(
        self, *, agent: str | None = None, id: str | None = None, limit: int = 1000
    ) -> list[SessionSummary]:
        """Sessions that have records, those that changed last first."""
        rows = await self._pool.fetch(sql.LIST, agent, id, limit)
        return [summary(tuple(row)) for row in rows]

    async def delete(self, key: SessionKey) -> bool:
        """Remove a session with its records and children; False where there is none."""
        async with self._pool.transaction() as connection:
            family = await connection.fetch(sql.FAMILY, key.agent, key.id, key.session)
            numbers = [number for number, _ in family]
            names = [name for _, name in family]
            forks = await connection.fetch(sql.FORKS, key.agent, key.id, names, numbers)
            if forks:
                raise has_forks(key, [str(SessionKey(key.agent, key.id, one)) for (one,) in forks])
            await connection.execute(sql.DELETE, numbers)
            await connection.execute(sql.SWEEP, time.time() - _UNUSED_SECONDS)
            tokens = [token(SessionKey(key.agent, key.id, name)) for name in names]
            await connection.execute(sql.NOTIFY, sql.CHANNEL, tokens)
        return bool(family)

    async def put_blob(self, data: bytes) -> str:
        """Keep bytes beside the records; gives their name, the same for the same bytes."""
        name = hashlib.sha256(data).hexdigest()
        await self._pool.fetch(sql.PUT_BLOB, name, time.time(), data)
        return name

    async def get_blob(self, name: str) -> bytes:
        """The bytes of that name. Raises `NotFound`."""
        rows = await self._pool.fetch(sql.GET_BLOB, name)
        if not rows:
            raise no_blob(name)
        return bytes(rows[0]["data"])

    async def aclose(self) -> None:
        """Let go of it; what was added stays."""
        await self._pool.aclose()


def token(key: SessionKey) -> str:
    """What a session is called in notifications, which must be short."""
    return hashlib.sha256(repr((key.agent, key.id, key.session)).encode()).hexdigest()
