"""Session store in one SQLite file, which several processes of a host may use at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from smokebox.agents.log import sqlite_tables as sql
from smokebox.agents.log.records import VERSION, StoredRecord, change_of, decode, encode
from smokebox.agents.log.sqlite_tables import SESSION_STORE
from smokebox.agents.log.store import (
    SessionKey,
    SessionSummary,
    Wakeups,
    busy,
    closed,
    fenced,
    follow_records,
    has_forks,
    no_blob,
)
from smokebox.agents.log.writer_locks import WriterLocks
from smokebox.foundation.storage import DatabaseWriter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from smokebox.agents.log.records import Record

T = TypeVar("T")

# Seconds between checks for records of other processes.
_POLL = 0.1
_RETRY = 0.05
# A blob is stored before the record that refers to it.
_UNUSED_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """The open file: one thread writes, another reads."""

    writer: DatabaseWriter
    reader: sqlite3.Connection
    reader_thread: ThreadPoolExecutor
    locks: WriterLocks

    def close(self) -> None:
        self.writer.close()
        self.reader_thread.shutdown()
        self.reader.close()
        self.locks.close()


class SqliteWriter:
    """Writer of one session of a file."""

    def __init__(
        self, store: SqliteStore, key: SessionKey, *, number: int, epoch: int, head: int
    ) -> None:
        self._store = store
        self._key = key
        self._number = number
        self._epoch = epoch
        self._head = head
        self._pending = 0
        self._released = False

    @property
    def head(self) -> int:
        """Offset of the last record, 0 before the first."""
        return self._head

    async def append(self, records: Sequence[Record]) -> int:
        """Append records, and return the new head once they are durable."""
        if self._released:
            raise fenced(self._key)
        now = time.time()
        rows = [(now, VERSION, encode(record)) for record in records]
        change = change_of(records)

        def append(connection: sqlite3.Connection) -> int:
            found = connection.execute(sql.HEAD, (self._number, self._epoch)).fetchone()
            if found is None:
                raise fenced(self._key)
            head = int(found[0])
            connection.executemany(
                sql.ADD, [(self._number, head + n, *row) for n, row in enumerate(rows, 1)]
            )
            connection.executemany(sql.USE, [(self._number, blob) for blob in change.blobs])
            if change.dropped:
                dropped = [(self._number, blob) for blob in change.dropped]
                connection.executemany(sql.DROP_USE, dropped)
                connection.execute(sql.DELETE_UNUSED_BLOBS, (now - _UNUSED_SECONDS,))
            connection.execute(
                sql.ADVANCE,
                (
                    head + len(rows),
                    now,
                    change.unfinished,
                    change.parent,
                    change.forked_from,
                    self._number,
                ),
            )
            return head + len(rows)

        if (file := self._store._file) is None:
            raise closed(self._store.path)
        self._pending += 1
        done = file.writer.submit(append)
        done.add_done_callback(self._appended)
        return await asyncio.shield(done)

    async def release(self) -> None:
        """Allow another writer. Safe to repeat."""
        if self._released:
            return
        self._released = True
        if (file := self._store._file) is None:
            return

        def drop_empty(connection: sqlite3.Connection) -> None:
            connection.execute(sql.DELETE_EMPTY, (self._number, self._epoch))

        try:
            # Runs after a pending append, which must not lose the lock before it is durable.
            if self._head == 0 or self._pending:
                await asyncio.shield(file.writer.submit(drop_empty))
        finally:
            file.locks.release(self._number)

    def _appended(self, done: asyncio.Future[int]) -> None:
        self._pending -= 1
        # Retrieves the exception too, as the caller may have been cancelled.
        if not done.cancelled() and done.exception() is None:
            self._head = done.result()
            self._store._wakeups.wake(self._key)


class SqliteStore:
    """Session store in a file, created on first use. Several event loops may use it."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self._opening = threading.Lock()
        self._file: _OpenFile | None = None
        self._wakeups = Wakeups()
        self._users = 1
        self._abandoned: list[_OpenFile] = []
        _stores.add(self)

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> SqliteWriter:
        """Become the writer of a session, which need not exist."""
        file = await self._ready()
        deadline = time.monotonic() + wait

        def find_or_create(connection: sqlite3.Connection) -> tuple[int, str]:
            now, names = time.time(), (key.agent, key.id, key.session)
            connection.execute(sql.CREATE, (*names, now, now))
            [(number, owner)] = connection.execute(sql.OWNER, names)
            return number, owner

        while True:
            number, owner = await file.writer.submit(find_or_create)
            if file.locks.acquire(number):
                taken = await self._take_over(file, number)
                if taken is not None:
                    epoch, head = taken
                    return SqliteWriter(self, key, number=number, epoch=epoch, head=head)
            elif time.monotonic() >= deadline:
                raise busy(key, owner or "another process")
            else:
                await asyncio.sleep(_RETRY)

    async def read(
        self, key: SessionKey, *, after: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Return the records after an offset."""
        rows = await self._select(sql.READ, (key.agent, key.id, key.session, after, limit))
        return [
            StoredRecord(place, at, decode(data, version, where=f"session {key}"))
            for place, at, version, data in rows
        ]

    def follow(self, key: SessionKey, *, after: int = 0) -> AsyncGenerator[StoredRecord, None]:
        """Yield the records after an offset, then new ones."""

        async def find() -> tuple[int | None, int]:
            rows = await self._select(sql.FIND, (key.agent, key.id, key.session))
            return rows[0] if rows else (None, 0)

        async def read(after: int, limit: int) -> list[StoredRecord]:
            return await self.read(key, after=after, limit=limit)

        return follow_records(self._wakeups, key, find=find, read=read, after=after, poll=_POLL)

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
        if agent is not None and id is not None and not prefix:
            # Uses the index, however many other sessions there are.
            rows = await self._select(sql.LIST_INSTANCE, (agent, id, limit))
        else:
            rows = await self._select(sql.LIST, (agent, agent, id, id, prefix, prefix, limit))
        return [sql.summary(row) for row in rows]

    async def delete(self, key: SessionKey) -> bool:
        """Delete a session with its records and child sessions; False if it does not exist."""
        deleted = await self._submit(lambda connection: _delete(connection, key))
        for name in deleted:
            self._wakeups.wake(SessionKey(key.agent, key.id, name))
        return bool(deleted)

    async def put_blob(self, data: bytes) -> str:
        """Store bytes, and return their name."""
        name = hashlib.sha256(data).hexdigest()
        row = (name, time.time(), data)
        await self._submit(lambda connection: connection.execute(sql.PUT_BLOB, row))
        return name

    async def get_blob(self, name: str) -> bytes:
        """Return the bytes that `put_blob` stored. Raises `NotFound`."""
        rows = await self._select(sql.GET_BLOB, (name,))
        if not rows:
            raise no_blob(name)
        return bytes(rows[0][0])

    async def aclose(self) -> None:
        """Close the file, after as many calls as there were of `share` and one more."""
        self._users = max(0, self._users - 1)
        if self._users == 0:
            file, self._file = self._file, None
            self._wakeups.close()
            if file is not None:
                await asyncio.to_thread(file.close)

    def share(self) -> bool:
        """Require one more `aclose`; False if the store was closed."""
        self._users += bool(self._users)
        return self._users > 0

    def _forget_file(self) -> None:
        """Open the file again on next use, in a forked process."""
        self._opening = threading.Lock()
        if self._file is not None:
            self._file.locks.close()
            # Never closed: SQLite forbids even closing a connection across a fork.
            self._abandoned.append(self._file)
            self._file = None

    async def _ready(self) -> _OpenFile:
        if self._users == 0:
            raise closed(self.path)
        if self._file is not None:
            return self._file
        return await asyncio.to_thread(self._open_file)

    def _open_file(self) -> _OpenFile:
        with self._opening:
            if self._file is not None:
                return self._file
            with contextlib.ExitStack() as undo:
                connection = SESSION_STORE.open(self.path)
                undo.callback(connection.close)
                reader = SESSION_STORE.connect(self.path)
                undo.callback(reader.close)
                locks = WriterLocks(f"{self.path}-owners")
                undo.pop_all()
            writer = DatabaseWriter(
                connection,
                name="smokebox-sessions",
                translate=lambda error: SESSION_STORE.translate(error, self.path),
            )
            thread = ThreadPoolExecutor(1, thread_name_prefix="smokebox-sessions-read")
            self._file = file = _OpenFile(writer, reader, thread, locks)
            return file

    async def _take_over(self, file: _OpenFile, number: int) -> tuple[int, int] | None:
        """Fence earlier writers, and return epoch and head; None if the session was deleted."""
        owner = f"process {os.getpid()}"

        def take_over(connection: sqlite3.Connection) -> tuple[int, int] | None:
            rows = connection.execute(sql.TAKE_OVER, (owner, number)).fetchall()
            return rows[0] if rows else None

        taken = None
        try:
            taken = await file.writer.submit(take_over)
        finally:
            if taken is None:
                file.locks.release(number)
        return taken

    async def _submit(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.shield((await self._ready()).writer.submit(job))

    async def _select(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        file = await self._ready()

        def read() -> list[tuple[Any, ...]]:
            return file.reader.execute(sql, values).fetchall()

        try:
            return await asyncio.get_running_loop().run_in_executor(file.reader_thread, read)
        except sqlite3.Error as error:
            raise SESSION_STORE.translate(error, self.path) from error


def _delete(connection: sqlite3.Connection, key: SessionKey) -> list[str]:
    family = connection.execute(sql.FAMILY, (key.agent, key.id, key.session)).fetchall()
    numbers = {number for number, _ in family}
    names = {name for _, name in family}
    forks = connection.execute(sql.FORKS, (key.agent, key.id)).fetchall()
    if needed_by := [
        str(SessionKey(key.agent, key.id, name))
        for number, name, origin in forks
        if origin in names and number not in numbers
    ]:
        raise has_forks(key, needed_by)
    connection.executemany(sql.DELETE, [(number,) for number in numbers])
    connection.execute(sql.DELETE_UNUSED_BLOBS, (time.time() - _UNUSED_SECONDS,))
    return sorted(names)


# A forked process must not keep the locks of its parent.
_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._forget_file()


os.register_at_fork(after_in_child=_after_fork)
