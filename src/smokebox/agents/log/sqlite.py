"""Sessions in one SQLite file, which several processes of a host may use at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from smokebox.agents.log import sqlite_tables as sql
from smokebox.agents.log.records import VERSION, StoredRecord, decode, encode
from smokebox.agents.log.sqlite_tables import SESSION_STORE
from smokebox.agents.log.store import (
    SessionKey,
    SessionSummary,
    Wakeups,
    busy,
    change_of,
    closed,
    fenced,
    has_forks,
    no_blob,
)
from smokebox.agents.log.writer_locks import WriterLocks, notify_after_fork
from smokebox.foundation.storage import DatabaseWriter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from smokebox.agents.log.records import Record

T = TypeVar("T")

# How often a follower looks for what another process has added.
_POLL = 0.1
_RETRY = 0.05
_PAGE = 500
# A blob is put before the record that names it.
_UNUSED_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class _Open:
    """The file, open: one thread writes, another reads."""

    commits: DatabaseWriter
    reader: sqlite3.Connection
    reads: ThreadPoolExecutor
    owners: WriterLocks

    def close(self) -> None:
        self.commits.close()
        self.reads.shutdown()
        self.reader.close()
        self.owners.close()


class SqliteWriter:
    """The right to add to one session of a file."""

    def __init__(
        self, store: SqliteStore, key: SessionKey, *, number: int, epoch: int, head: int
    ) -> None:
        self._store = store
        self._key = key
        self._number = number
        self._epoch = epoch
        self._head = head
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
        now = time.time()
        rows = [(now, VERSION, encode(record)) for record in records]
        change = change_of(records)

        def add(connection: sqlite3.Connection) -> int:
            found = connection.execute(sql.HEAD, (self._number, self._epoch)).fetchone()
            if found is None:
                raise fenced(self._key)
            head = int(found[0])
            connection.executemany(
                sql.ADD, [(self._number, head + n, *row) for n, row in enumerate(rows, 1)]
            )
            connection.executemany(sql.USE, [(self._number, one) for one in change.blobs])
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

        done = self._store._submit(add)
        done.add_done_callback(self._added)
        return await asyncio.shield(done)

    async def release(self) -> None:
        """Give the right back. Safe to repeat."""
        if not self._released:
            self._released = True
            await self._store._release(self._number, self._epoch)

    def _added(self, done: asyncio.Future[int]) -> None:
        # Also looks at an error that nobody may wait for any more.
        if not done.cancelled() and done.exception() is None:
            self._head = done.result()
            self._store._wakes.wake(self._key)


class SqliteStore:
    """A store in a file, made when it is first used. May be used by several event loops."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self._opening = threading.Lock()
        self._file: _Open | None = None
        self._wakes = Wakeups()
        self._users = 1
        self._abandoned: list[_Open] = []
        notify_after_fork(self)

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> SqliteWriter:
        """Become the writer of a session, which need not be there yet."""
        file = await self._ready()
        deadline = time.monotonic() + wait

        def make(connection: sqlite3.Connection) -> tuple[int, str]:
            return _find_or_make(connection, key)

        while True:
            number, owner = await file.commits.submit(make)
            if file.owners.take(number):
                taken = await self._take(file, number)
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
        """Records behind an offset, in order; none for a session that is not there."""
        rows = await self._select(sql.READ, (key.agent, key.id, key.session, after, limit))
        return [_stored(key, row) for row in rows]

    async def follow(
        self, key: SessionKey, *, after: int = 0
    ) -> AsyncGenerator[StoredRecord, None]:
        """Records behind an offset, then those that are added."""
        followed: int | None = None
        await self._ready()
        with self._wakes.listen(key) as more:
            while self._users:
                more.clear()
                found = await self._select(sql.FIND, (key.agent, key.id, key.session))
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
                    # Not by wait_for: before Python 3.12 that takes a cancellation for an answer
                    # when both come at once, and whoever cancelled waits for ever.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL):
                            await more.wait()

    async def sessions(
        self, *, agent: str | None = None, id: str | None = None, limit: int = 1000
    ) -> list[SessionSummary]:
        """Sessions that have records, those that changed last first."""
        if agent is not None and id is not None:
            # By the index, however many other sessions there are.
            rows = await self._select(sql.LIST_OF, (agent, id, limit))
        else:
            rows = await self._select(sql.LIST, (agent, agent, id, id, limit))
        return [sql.summary(row) for row in rows]

    async def delete(self, key: SessionKey) -> bool:
        """Remove a session with its records and children; False where there is none."""
        going = await self._submit_ready(lambda connection: _delete(connection, key))
        for name in going:
            self._wakes.wake(SessionKey(key.agent, key.id, name))
        return bool(going)

    async def put_blob(self, data: bytes) -> str:
        """Keep bytes beside the records; gives their name, the same for the same bytes."""
        name = hashlib.sha256(data).hexdigest()
        row = (name, time.time(), data)
        await self._submit_ready(lambda connection: connection.execute(sql.PUT_BLOB, row))
        return name

    async def get_blob(self, name: str) -> bytes:
        """The bytes of that name. Raises `NotFound`."""
        rows = await self._select(sql.GET_BLOB, (name,))
        if not rows:
            raise no_blob(name)
        return bytes(rows[0][0])

    async def aclose(self) -> None:
        """Let go of it, once for each `share`; what was added stays."""
        self._users = max(0, self._users - 1)
        if self._users == 0 and self._file is not None:
            file, self._file = self._file, None
            self._wakes.wake_all()
            await asyncio.to_thread(file.close)

    def share(self) -> bool:
        """Have it stay open for one `aclose` more; False when it was closed."""
        self._users += bool(self._users)
        return self._users > 0

    def after_fork(self) -> None:
        """In a copy of the process: open the file anew when it is used."""
        self._opening = threading.Lock()
        if self._file is not None:
            self._file.owners.close()
            # Kept for ever: SQLite must not even close what it opened before a fork.
            self._abandoned.append(self._file)
            self._file = None

    async def _ready(self) -> _Open:
        if self._users == 0:
            raise closed(self.path)
        if self._file is not None:
            return self._file
        return await asyncio.to_thread(self._open_file)

    def _open_file(self) -> _Open:
        with self._opening:
            file = self._file
            if file is None:
                self._file = file = self._open_now()
            return file

    def _open_now(self) -> _Open:
        with contextlib.ExitStack() as undo:
            writer = SESSION_STORE.open(self.path)
            undo.callback(writer.close)
            reader = SESSION_STORE.connect(self.path)
            undo.callback(reader.close)
            owners = WriterLocks(f"{self.path}-owners")
            undo.pop_all()
        commits = DatabaseWriter(
            writer,
            name="smokebox-sessions",
            translate=lambda error: SESSION_STORE.translate(error, self.path),
        )
        reads = ThreadPoolExecutor(1, thread_name_prefix="smokebox-sessions-read")
        return _Open(commits, reader, reads, owners)

    async def _take(self, file: _Open, number: int) -> tuple[int, int] | None:
        """Fence off whoever wrote before; None for a session that was deleted just now."""
        owner = f"process {os.getpid()}"

        def take(connection: sqlite3.Connection) -> tuple[int, int] | None:
            rows = connection.execute(sql.TAKE, (owner, number)).fetchall()
            return rows[0] if rows else None

        try:
            taken = await file.commits.submit(take)
        except BaseException:
            file.owners.give(number)
            raise
        if taken is None:
            file.owners.give(number)
        return taken

    async def _release(self, number: int, epoch: int) -> None:
        file = self._file
        if file is None:
            return

        def release(connection: sqlite3.Connection) -> None:
            connection.execute(sql.FORGET_EMPTY, (number, epoch))

        try:
            await asyncio.shield(file.commits.submit(release))
        finally:
            file.owners.give(number)

    def _submit(self, job: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        if self._file is None:
            raise closed(self.path)
        return self._file.commits.submit(job)

    async def _submit_ready(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.shield((await self._ready()).commits.submit(job))

    async def _select(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        file = await self._ready()

        def read() -> list[tuple[Any, ...]]:
            return file.reader.execute(sql, values).fetchall()

        try:
            return await asyncio.get_running_loop().run_in_executor(file.reads, read)
        except sqlite3.Error as error:
            raise SESSION_STORE.translate(error, self.path) from error


def _find_or_make(connection: sqlite3.Connection, key: SessionKey) -> tuple[int, str]:
    now = time.time()
    connection.execute(sql.MAKE, (key.agent, key.id, key.session, now, now))
    values = (key.agent, key.id, key.session)
    [(number, owner)] = connection.execute(sql.OWNER, values)
    return int(number), str(owner)


def _delete(connection: sqlite3.Connection, key: SessionKey) -> list[str]:
    family = connection.execute(sql.FAMILY, (key.agent, key.id, key.session)).fetchall()
    numbers = {number for number, _ in family}
    names = {name for _, name in family}
    beside = connection.execute(sql.FORKS, (key.agent, key.id)).fetchall()
    if forks := [
        str(SessionKey(key.agent, key.id, name))
        for number, name, origin in beside
        if origin in names and number not in numbers
    ]:
        raise has_forks(key, forks)
    connection.executemany(sql.DELETE, [(number,) for number in numbers])
    connection.execute(sql.SWEEP, (time.time() - _UNUSED_SECONDS,))
    return sorted(names)


def _stored(key: SessionKey, row: tuple[Any, ...]) -> StoredRecord:
    place, at, version, data = row
    return StoredRecord(place, at, decode(data, version, where=f"session {key}"))
