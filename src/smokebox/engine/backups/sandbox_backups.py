"""The backups of one sandbox: its directories are packed, and become again what they were."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.backups import archive
from smokebox.engine.backups.archive import ArchiveOptions, Progress
from smokebox.engine.backups.backups import random_backup_id
from smokebox.engine.backups.restore import RestoreJob, row_of, still
from smokebox.engine.disk import room
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.record.rows import BackupRow
from smokebox.errors import DeadlineExceeded, InvalidOption, LimitReached, StorageFull
from smokebox.foundation.paths import resolve
from smokebox.foundation.tasks import run_to_completion
from smokebox.options import check_timeout
from smokebox.types import BackupProgress, RestoredBackup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from typing import Literal

    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.jail.api import Owner
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.run import Run
    from smokebox.types import Backup

DEFAULT_PATH = "/workspace"
DEFAULT_TIMEOUT = 3600.0
DEFAULT_COMPRESSION = 3
STRONGEST = 19
LONGEST_NAME = 256
# As far as any filesystem counts.
LONGEST_TTL = float(1 << 40)


@dataclass(slots=True, eq=False)
class _Work:
    """A backup or a restore under way."""

    id: str
    operation: Literal["create", "restore"]
    path: str
    tally: Progress


class SandboxBackups:
    """What makes and restores backups of one sandbox, one at a time, in the order of calls.

    `measure` tells the bytes that the sandbox has on disk, and `cwd` where relative paths begin.
    """

    def __init__(
        self,
        life: Lifecycle,
        backups: Backups,
        *,
        cwd: Callable[[], str],
        measure: Callable[[Run], Coroutine[None, None, int]],
    ) -> None:
        self._life = life
        self._backups = backups
        self._cwd = cwd
        self._measure = measure
        self._desk = RootExecutor(self._root, backups.workers)
        self._turn = asyncio.Lock()
        self._works: list[_Work] = []

    @property
    def busy(self) -> bool:
        """Whether one is under way."""
        return bool(self._works)

    def progress(self) -> list[BackupProgress]:
        """How far those are that are under way, and those that wait for them."""
        return [
            BackupProgress(
                id=work.id,
                operation=work.operation,
                path=work.path,
                bytes=work.tally.bytes,
                total=work.tally.total,
                begun=work.tally.begun,
            )
            for work in self._works
        ]

    async def create(
        self,
        path: str = DEFAULT_PATH,
        *,
        id: str | None = None,
        name: str | None = None,
        ttl: float | None = None,
        excludes: Sequence[str] = (),
        gitignore: bool = False,
        compression: int = DEFAULT_COMPRESSION,
        freeze: bool = False,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Backup:
        """Keep what is in a directory at this moment; it outlives the sandbox.

        Programs run on meanwhile: each file is as it was at some moment while this lasted. With
        `freeze` they stand still, and all files are of one moment.
        """
        choice = ArchiveOptions(
            excludes=_check_excludes(excludes),
            gitignore=gitignore,
            compression=_check_compression(compression),
        )
        created_at = time.time()
        row = BackupRow(
            id=id or random_backup_id(),
            sandbox_id=self._life.id,
            path=resolve(path, self._cwd()),
            name=_check_name(name),
            status="making",
            place=self._backups.shelf.place,
            created_at=created_at,
            expires_at=None if ttl is None else created_at + _check_ttl(ttl),
        )
        work = _Work(row.id, "create", row.path, Progress())
        async with self._doing(work, timeout), self._life.use() as run:
            await self._desk.run(archive.check_directory, row.path)
            await self._backups.begin(row)
            try:
                return await self._make(run, row, choice, work.tally, freeze=freeze)
            except BaseException:
                await run_to_completion(self._backups.drop(row))
                raise

    async def restore(
        self,
        backup: Backup | str,
        *,
        path: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> RestoredBackup:
        """Have a directory be what a backup has of it, or leave it as it is where that fails.

        By default it is the one that was packed. What is in it and not in the backup is gone
        then. The backup may be of any sandbox.
        """
        id = backup if isinstance(backup, str) else backup.id
        work = _Work(id, "restore", "" if path is None else resolve(path, self._cwd()), Progress())
        async with self._doing(work, timeout):
            row = await self._backups.row(id)
            work.path, work.tally.total = work.path or row.path, row.bytes
            async with self._backups.shelf_of(row).fetch(row) as source, self._life.use() as run:
                await self._check_room(run, row)
                restoring = RestoreJob(run, self._backups, row_of(run, work.path))
                done = await restoring.restore(self._desk, source, work.tally)
        return RestoredBackup(id=id, path=work.path, files=done.files, bytes=done.bytes)

    async def ended(self) -> None:
        """End what is under way: the sandbox stops."""
        await self._desk.release()

    async def adopt(self, run: Run) -> None:
        """Take over a run of another engine's time, which may have stopped it."""
        if run.id in self._backups.interrupted or run.id in self._backups.unfinished:
            self._backups.interrupted.discard(run.id)
            await run.jail.thaw()
        await self.resume(run)

    async def resume(self, run: Run) -> None:
        """Finish what an engine was killed in the midst of."""
        for row in self._backups.unfinished.pop(run.id, ()):
            await RestoreJob(run, self._backups, row).resume()

    @contextlib.asynccontextmanager
    async def _doing(self, work: _Work, timeout: float | None) -> AsyncIterator[None]:
        """Its turn, for so many seconds with the wait for it."""
        limit = check_timeout(timeout)
        self._works.append(work)
        try:
            async with asyncio.timeout(limit) as deadline, self._turn:
                work.tally.begun = True
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            verb = "backing up" if work.operation == "create" else "restoring"
            raise DeadlineExceeded(
                f"{verb} {work.path} took longer than {limit:g} s, and was broken off.",
                hint="Pass a longer timeout=, or leave something out with excludes=.",
                operation=f"{work.operation}_backup",
                timeout=limit,
            ) from error
        finally:
            self._works.remove(work)

    async def _make(
        self, run: Run, row: BackupRow, choice: ArchiveOptions, tally: Progress, *, freeze: bool
    ) -> Backup:
        part = self._backups.folder.part(row.id)
        target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            async with still(run) if freeze else contextlib.nullcontext():
                written = await self._desk.run(archive.write, row.path, target, choice, tally)
        finally:
            os.close(target)
        whole = replace(
            row,
            size=written.size,
            bytes=written.bytes,
            files=written.files,
            disk=written.disk,
            checksum=written.checksum,
        )
        tally.total = tally.bytes
        await self._backups.shelf.keep(whole, part)
        return await self._backups.finish(whole)

    async def _check_room(self, run: Run, row: BackupRow) -> None:
        """Raise where a restored tree has no room beside the one that it replaces."""
        limit = run.limits.disk
        used = await self._measure(run) if limit is not None else 0
        if limit is not None and used + row.disk > limit:
            raise LimitReached(
                f"the sandbox has {used} bytes of disk, and backup {row.id} needs {row.disk} more "
                f"until it has replaced what is there: {limit} are allowed.",
                hint="Raise its disk limit, or remove what is to be replaced first.",
                limit="disk",
            )
        if room(run.directory) < row.disk:
            raise StorageFull(
                row.path,
                f"the host's disk has no room for backup {row.id} ({row.disk} bytes).",
                hint="Free some, such as by deleting backups or sandboxes.",
            )

    async def _root(self) -> tuple[int, Owner]:
        async with self._life.use() as run:
            return run.jail.root, run.jail.owner


def _check_name(name: str | None) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
        raise InvalidOption(
            f"the name of a backup has 1 to {LONGEST_NAME} printable characters, not {name!r:.80}.",
            hint="Leave it out, or say what is in it.",
            option="name",
            value=name,
        )
    return name


def _check_ttl(ttl: float) -> float:
    good = isinstance(ttl, int | float) and not isinstance(ttl, bool) and 0 < ttl <= LONGEST_TTL
    if not good or math.isnan(ttl):
        raise InvalidOption(
            f"ttl is the seconds that a backup is kept, not {ttl!r}.",
            hint="Pass for example ttl=3 * 86400, or leave it out to keep it until it is deleted.",
            option="ttl",
            value=ttl,
        )
    return float(ttl)


def _check_compression(level: int) -> int:
    if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= STRONGEST:
        raise InvalidOption(
            f"compression is a level of zstd from 1 to {STRONGEST}, not {level!r}.",
            hint=f"1 is the fastest, {DEFAULT_COMPRESSION} the default.",
            option="compression",
            value=level,
        )
    return level


def _check_excludes(excludes: Sequence[str]) -> tuple[str, ...]:
    Patterns("excludes", excludes)
    return tuple(excludes)
