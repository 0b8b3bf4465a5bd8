"""Session store in a Postgres database, for agents on several hosts.

A writer holds an advisory lock, which the server releases when the connection ends: a killed
process loses its sessions at once, a host that is unreachable after half a minute.
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
from smokebox.agents.log.records import VERSION, StoredRecord, change_of, decode, encode
from smokebox.agents.log.sqlite_tables import summary
from smokebox.agents.log.store import (
    SessionKey,
    SessionSummary,
    busy,
    fenced,
    follow_records,
    has_forks,
    no_blob,
)
from smokebox.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from smokebox.agents.log.records import LogChange, Record

# Seconds between checks of a follower that was not notified.
_POLL = 5.0
_RETRY = 0.1
# Delays between the attempts of an append while the server is unreachable.
_APPEND_DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0)
# A blob is stored before the record that refers to it.
_UNUSED_SECONDS = 3600.0


class PostgresWriter:
    """Writer of one session of a database."""

    def __init__(
        self, pool: PostgresPool, key: SessionKey, *, number: int, epoch: int, head: int
    ) -> None:
        self._pool = pool
        self._key = key
        self._number = number
        self._epoch = epoch
        self._head = head
        self._lock = asyncio.Lock()
        self._released = False

    @property
    def head(self) -> int:
        """Offset of the last record, 0 before the first."""
        return self._head

    async def append(self, records: Sequence[Record]) -> int:
        """Append records, and return the new head once they are durable."""
        if self._released:
            raise fenced(self._key)
        rows = [encode(record).decode() for record in records]
        return await asyncio.shield(asyncio.ensure_future(self._append(rows, change_of(records))))

    async def release(self) -> None:
        """Allow another writer. Safe to repeat."""
        async with self._lock:
            if self._released:
                return
            self._released = True
            # The lock ended with the connection to a server that cannot be reached.
            with contextlib.suppress(ServiceUnavailable):
                await self._pool.fetch(sql.DELETE_EMPTY, self._number, self._epoch)
                await self._pool.unlock(self._number)

    async def _append(self, rows: list[str], change: LogChange) -> int:
        async with self._lock:
            for delay in _APPEND_DELAYS:
                try:
                    return await self._append_once(rows, change)
                except ServiceUnavailable:
                    await asyncio.sleep(delay)
            return await self._append_once(rows, change)

    async def _append_once(self, rows: list[str], change: LogChange) -> int:
        await self._pool.ensure_locks()
        appended = await self._pool.fetch(
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
            list(change.dropped),
        )
        if appended:
            self._head = appended[0]["head"]
            return self._head
        # Only this writer moves the head in its epoch: an earlier attempt took effect, and its
        # response was lost.
        found = await self._pool.fetch(sql.HEAD, self._number, self._epoch)
        if found and found[0]["head"] == self._head + len(rows):
            self._head += len(rows)
            return self._head
        raise fenced(self._key)


class PostgresStore:
    """Session store in a database. Connects on first use; one event loop may use it.

    The URL must lead to the server itself: a pooler that shares connections between
    transactions loses locks and notifications.
    """

    def __init__(self, url: str) -> None:
        self._pool = PostgresPool(url)

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> PostgresWriter:
        """Become the writer of a session, which need not exist."""
        deadline = time.monotonic() + wait
        names = (key.agent, key.id, key.session)
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        while True:
            await self._pool.fetch(sql.CREATE, *names, time.time())
            rows = await self._pool.fetch(sql.OWNER, *names)
            if not rows:
                continue
            number = rows[0]["number"]
            if await self._pool.lock(number):
                taken = await self._pool.fetch(sql.TAKE_OVER, number, owner)
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
        """Return the records after an offset."""
        rows = await self._pool.fetch(sql.READ, key.agent, key.id, key.session, after, limit)
        where = f"session {key}"
        return [
            StoredRecord(place, at, decode(data.encode(), version, where=where))
            for place, at, version, data in rows
        ]

    def follow(self, key: SessionKey, *, after: int = 0) -> AsyncGenerator[StoredRecord, None]:
        """Yield the records after an offset, then new ones."""

        async def find() -> tuple[int | None, int]:
            await self._pool.ensure_locks()
            rows = await self._pool.fetch(sql.FIND, key.agent, key.id, key.session)
            return rows[0] if rows else (None, 0)

        async def read(after: int, limit: int) -> list[StoredRecord]:
            return await self.read(key, after=after, limit=limit)

        return follow_records(
            self._pool.wakeups, token(key), find=find, read=read, after=after, poll=_POLL
        )

    async def sessions(
        self,
        *,
        agent: str | None = None,
        id: str | None = None,
        prefix: str = "",
        limit: int = 1000,
    ) -> list[SessionSummary]:
        """List the sessions that have records, the one that changed last first.

        With `prefix`, only those whose ids begin with it.
        """
        rows = await self._pool.fetch(sql.LIST, agent, id, prefix, limit)
        return [summary(tuple(row)) for row in rows]

    async def delete(self, key: SessionKey) -> bool:
        """Delete a session with its records and child sessions; False if it does not exist."""
        async with self._pool.transaction() as connection:
            family = await connection.fetch(sql.FAMILY, key.agent, key.id, key.session)
            numbers = [number for number, _ in family]
            names = [name for _, name in family]
            forks = await connection.fetch(sql.FORKS, key.agent, key.id, names, numbers)
            if forks:
                raise has_forks(
                    key, [str(SessionKey(key.agent, key.id, fork)) for (fork,) in forks]
                )
            await connection.execute(sql.DELETE, numbers)
            await connection.execute(sql.DELETE_UNUSED_BLOBS, time.time() - _UNUSED_SECONDS)
            tokens = [token(SessionKey(key.agent, key.id, name)) for name in names]
            await connection.execute(sql.NOTIFY, sql.CHANNEL, tokens)
        return bool(family)

    async def put_blob(self, data: bytes) -> str:
        """Store bytes, and return their name."""
        name = hashlib.sha256(data).hexdigest()
        await self._pool.fetch(sql.PUT_BLOB, name, time.time(), data)
        return name

    async def get_blob(self, name: str) -> bytes:
        """Return the bytes that `put_blob` stored. Raises `NotFound`."""
        rows = await self._pool.fetch(sql.GET_BLOB, name)
        if not rows:
            raise no_blob(name)
        return bytes(rows[0]["data"])

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()


def token(key: SessionKey) -> str:
    """Return the name of a session in notifications, whose length Postgres limits."""
    return hashlib.sha256(repr((key.agent, key.id, key.session)).encode()).hexdigest()
