"""The durable record of all sandboxes, in one SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from smokebox.engine.record.rows import (
    TABLES,
    BackupRow,
    BuildStepRow,
    ImageGrantRow,
    ImageNameRow,
    ImageRow,
    RestoreRow,
    SandboxRow,
    SnapshotLayerRow,
    SnapshotRow,
    load,
    where,
)
from smokebox.engine.record.schema import RECORD, translate_error
from smokebox.errors import SandboxGone
from smokebox.foundation.storage import DatabaseWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.record.rows import R, RowChange, Value
    from smokebox.types import SandboxStatus


class Record:
    """An open record. Use it only on the event loop that opened it."""

    def __init__(self, path: str, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self.path = path
        self._closed = False
        self._writer = DatabaseWriter(
            writer, name="smokebox-record", translate=lambda error: translate_error(error, path)
        )
        self._reader = reader
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="smokebox-record-read")

    @classmethod
    async def open(cls, path: str) -> Self:
        """Open the record, and create or migrate it if needed. The caller holds the home's lock.

        Raises:
            PathError: The file is damaged.
            Unsupported: The file is of a later version.
        """
        writer = await asyncio.to_thread(RECORD.open, path)
        try:
            return cls(path, writer, await asyncio.to_thread(RECORD.connect, path))
        except BaseException:
            writer.close()
            raise

    async def write(self, *changes: RowChange) -> int:
        """Make all changes or none, in the order of calls, and return the number of changed rows.

        Once it returns, the changes survive the death of this process. When it is cancelled, they
        may have been made. Raises `NotFound` for a row of an unknown sandbox.
        """
        self._check_open()

        def apply(connection: sqlite3.Connection) -> int:
            return sum(connection.execute(one.sql, one.values).rowcount for one in changes)

        return await self._writer.submit(apply)

    async def get(self, kind: type[R], *key: Value) -> R | None:
        """Return the row with that key, or None."""
        found = await self._select(kind, where(TABLES[kind].keys), *key)
        return found[0] if found else None

    async def rows(self, kind: type[R], key: str) -> list[R]:
        """Return the rows of a sandbox or image, in the order of insertion.

        `key` is the first part of their keys.
        """
        condition = where(TABLES[kind].keys[:1]) + " ORDER BY rowid"
        return await self._select(kind, condition, key)

    async def sandboxes(
        self,
        *,
        status: SandboxStatus | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> list[SandboxRow]:
        """Return sandboxes by id, filtered by status, labels and prefix of the id."""
        # Ids are ASCII: those with the prefix sort before the prefix and DEL.
        conditions = ["id BETWEEN ? AND ?"]
        values: list[Value] = [prefix, f"{prefix}\x7f"]
        if status is not None:
            conditions.append("status = ?")
            values.append(status)
        for label in (labels or {}).items():
            conditions.append(
                "EXISTS (SELECT 1 FROM json_each(labels) WHERE key = ? AND value = ?)"
            )
            values += label
        condition = f" WHERE {' AND '.join(conditions)} ORDER BY id"
        return await self._select(SandboxRow, condition, *values)

    async def all_active(self) -> list[SandboxRow]:
        """Return the sandboxes that a starting engine has to adopt or finish destroying."""
        return await self._select(SandboxRow, " WHERE status IN ('active', 'destroying')")

    async def backups(self, *, sandbox_id: str | None = None) -> list[BackupRow]:
        """Return the backups of all sandboxes or of one, in any state, oldest first."""
        if sandbox_id is None:
            return await self._select(BackupRow, " ORDER BY created_at, rowid")
        condition = " WHERE sandbox_id = ? ORDER BY created_at, rowid"
        return await self._select(BackupRow, condition, sandbox_id)

    async def restores(self) -> list[RestoreRow]:
        """Return the unfinished restores of an earlier engine."""
        return await self._select(RestoreRow, " ORDER BY rowid")

    async def images(self) -> list[ImageRow]:
        """Return all images, the oldest first."""
        return await self._select(ImageRow, " ORDER BY created_at, rowid")

    async def image_names(self) -> list[ImageNameRow]:
        """Return all names of images, sorted."""
        return await self._select(ImageNameRow, " ORDER BY name, scope")

    async def image_grants(self) -> list[ImageGrantRow]:
        """Return all grants of images."""
        return await self._select(ImageGrantRow, "")

    async def sandboxes_of(self, digest: str) -> list[SandboxRow]:
        """Return the sandboxes that were created from the image of a digest."""
        return await self._select(SandboxRow, " WHERE digest = ? ORDER BY id", digest)

    async def build_steps(self) -> list[BuildStepRow]:
        """Return the cached steps of builds of all scopes, the least recently used first."""
        return await self._select(BuildStepRow, " ORDER BY used_at")

    async def pending(self) -> list[SandboxRow]:
        """Return the sandboxes whose upper layer an earlier engine did not finish to change."""
        return await self._select(SandboxRow, " WHERE pending != ''")

    async def snapshots(self, *, sandbox_id: str | None = None) -> list[SnapshotRow]:
        """Return the snapshots of all sandboxes or of one, in any state, oldest first."""
        if sandbox_id is None:
            return await self._select(SnapshotRow, " ORDER BY created_at, rowid")
        condition = " WHERE sandbox_id = ? ORDER BY created_at, rowid"
        return await self._select(SnapshotRow, condition, sandbox_id)

    async def snapshot_by_name(self, scope: str, name: str) -> SnapshotRow | None:
        """Return the snapshot with a name in a scope, or None."""
        found = await self._select(SnapshotRow, " WHERE scope = ? AND name = ?", scope, name)
        return found[0] if found else None

    async def snapshot_layers(self, *, sandbox_id: str | None = None) -> list[SnapshotLayerRow]:
        """Return the layers of snapshots, of all sandboxes or of one."""
        if sandbox_id is None:
            return await self._select(SnapshotLayerRow, " ORDER BY rowid")
        return await self._select(SnapshotLayerRow, " WHERE sandbox_id = ?", sandbox_id)

    async def flush(self) -> None:
        """Put what was written on the disk, where it survives a crash of the host."""
        await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            # Without a log, all of it is in the database.
            log = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(log)
            finally:
                os.close(log)

    async def aclose(self) -> None:
        """Commit pending changes, and close the file. Safe to repeat."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _select(self, kind: type[R], condition: str, *values: Value) -> list[R]:
        self._check_open()
        sql = TABLES[kind].select + condition

        def read() -> list[R]:
            return [load(kind, row) for row in self._reader.execute(sql, values)]

        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, read)
        except sqlite3.Error as error:
            raise translate_error(error, self.path) from error

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                f"the record {self.path} was closed.",
                hint="Its engine was closed: open another.",
                reason="closed",
            )

    def _close(self) -> None:
        self._reads.shutdown()
        self._reader.close()
        self._writer.close()
