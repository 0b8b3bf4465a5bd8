"""All backups of one host: listed in the record, found by id, and removed when they expire."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.backups.archive_store import FolderArchiveStore, open_bucket
from smokebox.engine.record.rows import BackupRow, RestoreRow, delete, put, update
from smokebox.engine.workers import Workers
from smokebox.errors import Conflict, NotFound, ServiceUnavailable, SmokeboxError
from smokebox.foundation.ids import new_global_id
from smokebox.types import Backup

if TYPE_CHECKING:
    from smokebox.engine.backups.archive_store import ArchiveStore
    from smokebox.engine.record.record import Record

# Each running backup or restore keeps a CPU busy.
MAX_RUNNING = 4
# Time after which a jump of the clock is noticed.
MAX_SLEEP_SECONDS = 60.0

_log = logging.getLogger("smokebox.engine")


def random_backup_id() -> str:
    """Return a unique id that cannot be guessed."""
    return new_global_id("b")


def backup_of(row: BackupRow) -> Backup:
    """Return the public form of a row."""
    return Backup(
        id=row.id,
        sandbox_id=row.sandbox_id,
        path=row.path,
        name=row.name,
        size=row.size,
        bytes=row.bytes,
        files=row.files,
        checksum=row.checksum,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


class Backups:
    """The backups of a host, including those of destroyed sandboxes.

    New ones are stored in `folder`, or in the bucket at `url`; others stay where they are.
    `unfinished` holds restores that a killed engine left, by sandbox, and `interrupted` the
    sandboxes of which it was making backups.
    """

    def __init__(self, record: Record, folder: str, url: str | None = None) -> None:
        self.folder = FolderArchiveStore(folder)
        self.store: ArchiveStore = self.folder if url is None else open_bucket(url, self.folder)
        self.workers = Workers(MAX_RUNNING)
        self.unfinished: dict[str, list[RestoreRow]] = {}
        self.interrupted: set[str] = set()
        self._record = record
        self._changed = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None

    async def take_over(self) -> None:
        """Remove what a killed engine left unfinished, and start the reaper."""
        rows = await self._record.backups()
        for row in rows:
            if row.status == "making":
                self.interrupted.add(row.sandbox_id)
                row = replace(row, status="deleting")
                await self._record.write(update(row))
            # Those in a bucket are left to the reaper: opening must not wait for a network.
            if row.status == "deleting" and not row.place:
                await self.discard(row)
        known = {row.id for row in rows if row.status == "ready"}
        for row in await asyncio.to_thread(self.folder.sweep, known):
            await self._record.write(put(row))
        for restore in await self._record.restores():
            self.unfinished.setdefault(restore.sandbox_id, []).append(restore)
        self._reaper = asyncio.create_task(self._reap())

    async def aclose(self) -> None:
        """Stop the reaper and the threads."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
        self.workers.close()

    async def list(self, *, sandbox_id: str | None = None, prefix: str = "") -> list[Backup]:
        """Return backups, oldest first: of all sandboxes, of one, or of ids with a prefix."""
        rows = await self._record.backups(sandbox_id=sandbox_id)
        return [
            backup_of(row)
            for row in rows
            if row.status == "ready" and not _expired(row) and row.sandbox_id.startswith(prefix)
        ]

    async def get(self, id: str) -> Backup:
        """Return a backup. Raises `NotFound` if it is missing or has expired."""
        return backup_of(await self.row(id))

    async def row(self, id: str) -> BackupRow:
        """Return the row of a backup that can be restored."""
        row = await self._record.get(BackupRow, id)
        if row is None and (row := await self.store.find(id)) is not None:
            # Made by another server with the same bucket.
            await self._record.write(put(row))
        if row is None or row.status != "ready":
            raise NotFound(
                f"there is no backup {id!r}: it was deleted, has expired, or never existed.",
                hint="List the existing ones with `smokebox backup ls`.",
                kind="backup",
                name=id,
            )
        if _expired(row):
            await self.discard(row)
            raise NotFound(
                f"backup {id} has expired and was removed.",
                hint="Create the next one with a longer ttl=, or without.",
                kind="backup",
                name=id,
                expired_at=row.expires_at,
            )
        return row

    async def delete(self, id: str) -> None:
        """Delete a backup, if it exists. Raises `Conflict` while it is being made."""
        row = await self._record.get(BackupRow, id) or await self.store.find(id)
        if row is None:
            return
        if row.status == "making":
            raise Conflict(
                f"backup {id} is being made.",
                hint="Cancel that, or wait for it.",
                kind="backup",
                name=id,
            )
        await self._remove(row)

    def store_of(self, row: BackupRow) -> ArchiveStore:
        """Return the store of a backup. Raises `ServiceUnavailable` if this server lacks it."""
        for store in (self.folder, self.store):
            if store.place == row.place:
                return store
        raise ServiceUnavailable(
            f"backup {row.id} is in {row.place}, which this server was not started with.",
            hint=f"Start it with --backups for {row.place}.",
            service="backups",
        )

    async def begin(self, row: BackupRow) -> None:
        """Record that a backup is being made, before any file of it exists."""
        if await self._record.get(BackupRow, row.id) is not None:
            raise Conflict(
                f"backup {row.id} already exists.",
                hint="Omit the id.",
                kind="backup",
                name=row.id,
            )
        await self._record.write(put(row))

    async def finish(self, row: BackupRow) -> Backup:
        """Record that a backup is complete."""
        ready = replace(row, status="ready")
        await self._record.write(update(ready))
        self._changed.set()
        return backup_of(ready)

    async def discard(self, row: BackupRow) -> None:
        """Remove a backup, or what exists of it; if that fails, the reaper retries it."""
        try:
            await self._remove(row)
        except (SmokeboxError, OSError) as error:
            _log.warning("backup %s was not removed: %s", row.id, error)

    async def save_restore(self, restore: RestoreRow) -> None:
        """Record the state of a restore. Raises `NotFound` if its sandbox was destroyed."""
        await self._record.write(put(restore))

    async def delete_restore(self, restore: RestoreRow) -> None:
        """Remove a finished restore from the record."""
        await self._record.write(delete(RestoreRow, restore.sandbox_id, restore.staging))

    async def _reap(self) -> None:
        """Remove expired backups, and those whose removal failed before."""
        while True:
            self._changed.clear()
            pause = MAX_SLEEP_SECONDS
            for row in await self._record.backups():
                if row.status == "deleting" or (row.status == "ready" and _expired(row)):
                    await self.discard(row)
                elif row.expires_at is not None:
                    pause = min(pause, row.expires_at - time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause, 0.01)):
                    await self._changed.wait()

    async def _remove(self, row: BackupRow) -> None:
        if row.status != "deleting":
            await self._record.write(put(replace(row, status="deleting")))
        await self.store_of(row).remove(row.id)
        await self._record.write(delete(BackupRow, row.id))


def _expired(row: BackupRow) -> bool:
    return row.expires_at is not None and row.expires_at <= time.time()
