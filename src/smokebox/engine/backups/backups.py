"""All backups of one host: kept in the record, found by their ids, and removed in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.backups.archive_store import FolderArchiveStore, open_bucket
from smokebox.engine.record.rows import BackupRow, RestoreRow, SandboxRow, delete, put, update
from smokebox.engine.workers import Workers
from smokebox.errors import Conflict, NotFound, ServiceUnavailable, SmokeboxError
from smokebox.foundation.ids import new_global_id
from smokebox.types import Backup

if TYPE_CHECKING:
    from smokebox.engine.backups.archive_store import ArchiveStore
    from smokebox.engine.record.record import Record

# So many are made or restored at a time: each keeps a processor busy.
AT_ONCE = 4
# A clock that jumps is noticed after this.
LONGEST_REST = 60.0

_log = logging.getLogger("smokebox.engine")


def random_backup_id() -> str:
    """An id that no backup has, and that nobody guesses."""
    return new_global_id("b")


def backup_of(row: BackupRow) -> Backup:
    """A row of the record, as its users see it."""
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
    """The backups of a host, also of sandboxes that are gone.

    They are kept in `folder`, or in the bucket that `url` names. What was kept elsewhere before
    stays there. `unfinished` has the restores that an engine was killed in, by sandbox, and
    `interrupted` the sandboxes that it was making backups of.
    """

    def __init__(self, record: Record, folder: str, url: str | None = None) -> None:
        self.folder = FolderArchiveStore(folder)
        self.shelf: ArchiveStore = self.folder if url is None else open_bucket(url, self.folder)
        self.workers = Workers(AT_ONCE)
        self.unfinished: dict[str, list[RestoreRow]] = {}
        self.interrupted: set[str] = set()
        self._record = record
        self._changed = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None

    async def take_over(self) -> None:
        """Remove what an engine before this one had not finished, and begin to watch the time."""
        rows = await self._record.backups()
        for row in rows:
            if row.status == "making":
                self.interrupted.add(row.sandbox_id)
                row = replace(row, status="deleting")
                await self._record.write(update(row))
            # Nobody waits for a bucket here: the reaper does.
            if row.status == "deleting" and not row.place:
                await self._remove_quietly(row)
        known = {row.id for row in rows if row.status == "ready"}
        for row in await asyncio.to_thread(self.folder.sweep, known):
            await self._record.write(put(row))
        for restore in await self._record.restores():
            self.unfinished.setdefault(restore.sandbox_id, []).append(restore)
        self._reaper = asyncio.create_task(self._reap())

    async def aclose(self) -> None:
        """Stop watching the time."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.wait([self._reaper])
        self.workers.close()

    async def list(self, *, sandbox_id: str | None = None, prefix: str = "") -> list[Backup]:
        """The backups of all sandboxes, of one, or of those whose ids begin so; oldest first."""
        rows = await self._record.backups(sandbox_id=sandbox_id)
        return [
            backup_of(row)
            for row in rows
            if row.status == "ready" and not _expired(row) and row.sandbox_id.startswith(prefix)
        ]

    async def get(self, id: str) -> Backup:
        """The backup of that id. Raises `NotFound`, also for one that has expired."""
        return backup_of(await self.row(id))

    async def row(self, id: str) -> BackupRow:
        """The row of a backup that is there."""
        row = await self._record.get(BackupRow, id)
        if row is None and (row := await self.shelf.find(id)) is not None:
            # Of another server that keeps its backups in the same bucket.
            await self._record.write(put(row))
        if row is None or row.status != "ready":
            raise _missing(id)
        if _expired(row):
            await self._remove_quietly(row)
            raise NotFound(
                f"backup {id} has expired, and was removed.",
                hint="Make the next one with a longer ttl=, or with none.",
                kind="backup",
                name=id,
                expired_at=row.expires_at,
            )
        return row

    async def delete(self, id: str) -> None:
        """Remove a backup. One that is not there is fine, one that is being made is not."""
        row = await self._record.get(BackupRow, id) or await self.shelf.find(id)
        if row is None:
            return
        if row.status == "making":
            raise Conflict(
                f"backup {id} is being made.",
                hint="Break that off, or wait for it.",
                kind="backup",
                name=id,
            )
        await self._remove(row)

    def shelf_of(self, row: BackupRow) -> ArchiveStore:
        """Where a backup is kept. Raises `ServiceUnavailable` where this server has not that."""
        for shelf in (self.folder, self.shelf):
            if shelf.place == row.place:
                return shelf
        raise ServiceUnavailable(
            f"backup {row.id} is kept in {row.place}, which this server was not started with.",
            hint=f"Start it with --backups for {row.place}.",
            service="backups",
        )

    async def begin(self, row: BackupRow) -> None:
        """Write down that a backup is being made, before anything is there of it."""
        if await self._record.get(BackupRow, row.id) is not None:
            raise Conflict(
                f"there is a backup {row.id} already.",
                hint="Leave the id out.",
                kind="backup",
                name=row.id,
            )
        await self._record.write(put(row))

    async def finish(self, row: BackupRow) -> Backup:
        """Write down that a backup is there."""
        ready = replace(row, status="ready")
        await self._record.write(update(ready))
        self._changed.set()
        return backup_of(ready)

    async def drop(self, row: BackupRow) -> None:
        """Remove what there is of a backup whose making has failed."""
        await self._remove_quietly(row)

    async def note(self, restore: RestoreRow) -> None:
        """Write down how far a restore has come. Raises `NotFound` once its sandbox is gone."""
        await self._record.write(put(restore))

    async def forget(self, restore: RestoreRow) -> None:
        """Have nothing be left to do of a restore."""
        await self._record.write(delete(RestoreRow, restore.sandbox_id, restore.staging))

    async def is_there(self, sandbox_id: str) -> bool:
        """Whether the record has a sandbox."""
        return await self._record.get(SandboxRow, sandbox_id) is not None

    async def _reap(self) -> None:
        """Remove backups when they expire, and those whose removal has failed."""
        while True:
            self._changed.clear()
            rest = LONGEST_REST
            for row in await self._record.backups():
                if row.status == "deleting" or (row.status == "ready" and _expired(row)):
                    await self._remove_quietly(row)
                elif row.expires_at is not None:
                    rest = min(rest, row.expires_at - time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(rest, 0.01)):
                    await self._changed.wait()

    async def _remove_quietly(self, row: BackupRow) -> None:
        """Remove a backup; where that fails now, the next engine tries it again."""
        try:
            await self._remove(row)
        except (SmokeboxError, OSError) as error:
            _log.warning("backup %s was not removed: %s", row.id, error)

    async def _remove(self, row: BackupRow) -> None:
        if row.status != "deleting":
            await self._record.write(put(replace(row, status="deleting")))
        await self.shelf_of(row).remove(row.id)
        await self._record.write(delete(BackupRow, row.id))


def _expired(row: BackupRow) -> bool:
    return row.expires_at is not None and row.expires_at <= time.time()


def _missing(id: str) -> NotFound:
    return NotFound(
        f"there is no backup {id!r}: it was deleted, has expired, or was never made.",
        hint="`smokebox backup list` has those that there are.",
        kind="backup",
        name=id,
    )
