"""The durable record: everything known about every sandbox, in one SQLite file.

`rows` defines the rows and the changes to them, `schema` the file itself.
"""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from smokebox.engine.record.rows import BackupRow, RestoreRow, SandboxRow, load, table, where
from smokebox.engine.record.schema import RECORD, fault
from smokebox.errors import SandboxGone
from smokebox.foundation.storage import DatabaseWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.record.rows import R, RowChange, Value
    from smokebox.types import SandboxStatus


class Record:
    """The record, open. Made by `Record.open`, used in the event loop that opened it."""

    def __init__(self, path: str, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self.path = path
        self._closed = False
        self._writer = Writer(path, writer)
        self._reader = reader
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="smokebox-record-read")

    @classmethod
    async def open(cls, path: str) -> Self:
        """Open the record, made or brought up to date as needed. Its home must be ours.

        Raises `PathError` for a file that is broken, and `Unsupported` for one of a later
        version.
        """
        writer = await asyncio.to_thread(RECORD.open, path)
        try:
            return cls(path, writer, await asyncio.to_thread(RECORD.connect, path))
        except BaseException:
            writer.close()
            raise

    async def write(self, *changes: RowChange) -> int:
        """Make all the changes or none, and return how many rows they touched.

        Once it returns, they survive the death of this process; who is cancelled before
        that cannot know. Calls take effect in their order. Raises `NotFound` for a row of a
        sandbox that is not there.
        """
        self._check_open()
        return await self._writer.submit(changes)

    async def get(self, kind: type[R], *key: Value) -> R | None:
        """The row with that key, or None."""
        found = await self._select(kind, where(table(kind).keys), *key)
        return found[0] if found else None

    async def rows(self, kind: type[R], sandbox_id: str) -> list[R]:
        """The rows of a sandbox, in the order in which they were added."""
        return await self._select(kind, where(table(kind).keys[:1]) + " ORDER BY rowid", sandbox_id)

    async def sandboxes(
        self,
        *,
        status: SandboxStatus | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str = "",
        after: str = "",
        limit: int | None = None,
    ) -> list[SandboxRow]:
        """The sandboxes that fit, by id: with all of these labels, and an id that begins so.

        With `limit` at most that many; the id of the last is the next call's `after`.
        """
        # Ids are ASCII: what begins with the prefix is before the prefix and DEL.
        conditions = ["id > ?", "id BETWEEN ? AND ?"]
        values: list[Value] = [after, prefix, f"{prefix}\x7f"]
        if status is not None:
            conditions.append("status = ?")
            values.append(status)
        for label in (labels or {}).items():
            conditions.append(
                "EXISTS (SELECT 1 FROM json_each(labels) WHERE key = ? AND value = ?)"
            )
            values += label
        condition = f" WHERE {' AND '.join(conditions)} ORDER BY id LIMIT ?"
        return await self._select(SandboxRow, condition, *values, -1 if limit is None else limit)

    async def all_active(self) -> list[SandboxRow]:
        """What an engine that starts must see to: sandboxes to adopt, or to finish destroying."""
        return await self._select(SandboxRow, " WHERE status IN ('active', 'destroying')")

    async def backups(self, *, sandbox_id: str | None = None) -> list[BackupRow]:
        """The backups that there are, in any state, of all sandboxes or of one; oldest first."""
        if sandbox_id is None:
            return await self._select(BackupRow, " ORDER BY created_at, rowid")
        condition = " WHERE sandbox_id = ? ORDER BY created_at, rowid"
        return await self._select(BackupRow, condition, sandbox_id)

    async def restores(self) -> list[RestoreRow]:
        """What an engine before this one has begun to restore, and not finished."""
        return await self._select(RestoreRow, " ORDER BY rowid")

    async def aclose(self) -> None:
        """Commit what was asked for, and close the file. Safe to repeat."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _select(self, kind: type[R], condition: str, *values: Value) -> list[R]:
        self._check_open()
        sql = table(kind).select + condition

        def read() -> list[R]:
            return [load(kind, row) for row in self._reader.execute(sql, values)]

        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, read)
        except sqlite3.Error as error:
            raise fault(error, self.path) from error

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                f"the record {self.path} was closed.",
                hint="Its engine has ended: start another.",
                reason="closed",
            )

    def _close(self) -> None:
        self._reads.shutdown()
        self._reader.close()
        self._writer.close()


class Writer:
    """Writes changes in the order in which they are asked for."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self._commits = DatabaseWriter(
            connection, name="smokebox-record", translate=lambda error: fault(error, path)
        )

    def submit(self, changes: tuple[RowChange, ...]) -> asyncio.Future[int]:
        """Ask for changes. The future has the number of rows once they are committed."""

        def apply(connection: sqlite3.Connection) -> int:
            return sum(connection.execute(one.sql, one.values).rowcount for one in changes)

        return self._commits.submit(apply)

    def close(self) -> None:
        """Commit what was asked for, and end the thread. Blocks until then."""
        self._commits.close()
