"""Backups of the directories of one sandbox, and restores into it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from smokebox.engine.backups import archive
from smokebox.engine.backups.archive import ArchiveOptions, BackupOperation
from smokebox.engine.backups.backups import random_backup_id
from smokebox.engine.backups.restore import RestoreJob, frozen, new_restore
from smokebox.engine.disk import available_bytes
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.record.rows import BackupRow
from smokebox.engine.run import RunPart
from smokebox.errors import DeadlineExceeded, InvalidOption, LimitReached, StorageFull
from smokebox.foundation.paths import resolve
from smokebox.foundation.tasks import run_to_completion
from smokebox.options import check_timeout
from smokebox.types import BackupProgress, RestoredBackup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.jail.spec import Owner
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.run import Run
    from smokebox.types import Backup

DEFAULT_PATH = "/workspace"
DEFAULT_TIMEOUT = 3600.0
DEFAULT_COMPRESSION = 3
MAX_COMPRESSION = 19
MAX_NAME = 256
MAX_TTL = float(1 << 40)


class SandboxBackups(RunPart):
    """Creates and restores backups of one sandbox, one at a time, in the order of calls.

    `measure` returns the disk usage of the sandbox in bytes, and `cwd` the directory of relative
    paths.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        backups: Backups,
        *,
        cwd: Callable[[], str],
        measure: Callable[[Run], Coroutine[None, None, int]],
    ) -> None:
        self._lifecycle = lifecycle
        self._backups = backups
        self._cwd = cwd
        self._measure = measure
        self._executor = RootExecutor(self._root, backups.workers)
        self._lock = asyncio.Lock()
        self._operations: list[BackupOperation] = []
        self.replacing = asyncio.Lock()
        """Held while a directory is replaced: no snapshot may be made meanwhile."""

    @property
    def busy(self) -> bool:
        """True while a backup or restore runs."""
        return bool(self._operations)

    def progress(self) -> list[BackupProgress]:
        """Return the progress of running and queued backups and restores."""
        return [BackupProgress(**asdict(operation)) for operation in self._operations]

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
        """Back up a directory. The backup outlives the sandbox.

        Processes keep running, so that files can be from different moments. With `freeze` they
        are stopped meanwhile, and all files are from one moment.
        """
        # Raises for an invalid pattern before anything starts.
        Patterns("excludes", excludes)
        options = ArchiveOptions(
            excludes=tuple(excludes),
            gitignore=gitignore,
            compression=_check_compression(compression),
        )
        created_at = time.time()
        row = BackupRow(
            id=id or random_backup_id(),
            sandbox_id=self._lifecycle.id,
            path=resolve(path, self._cwd()),
            name=_check_name(name),
            status="making",
            place=self._backups.store.place,
            created_at=created_at,
            expires_at=None if ttl is None else created_at + _check_ttl(ttl),
        )
        operation = BackupOperation(row.id, "create", row.path)
        async with self._exclusive(operation, timeout), self._lifecycle.use() as run:
            await self._executor.run(archive.check_directory, row.path)
            await self._backups.begin(row)
            try:
                return await self._make(run, row, options, operation, freeze=freeze)
            except BaseException:
                await run_to_completion(self._backups.discard(row))
                raise

    async def restore(
        self,
        backup: Backup | str,
        *,
        path: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> RestoredBackup:
        """Replace a directory by the content of a backup, or leave it unchanged on failure.

        `path` is by default the directory that was backed up. Files that are not in the backup
        are removed. The backup may be of any sandbox.
        """
        id = backup if isinstance(backup, str) else backup.id
        target = "" if path is None else resolve(path, self._cwd())
        operation = BackupOperation(id, "restore", target)
        async with self._exclusive(operation, timeout):
            row = await self._backups.row(id)
            operation.path, operation.total = target or row.path, row.bytes
            store = self._backups.store_of(row)
            async with store.fetch(row) as source, self._lifecycle.use() as run:
                await self._check_room(run, row)
                job = RestoreJob(run, self._backups, new_restore(run, operation.path))
                async with self.replacing:
                    result = await job.restore(self._executor, source, operation)
        return RestoredBackup(id=id, path=operation.path, files=result.files, bytes=result.bytes)

    async def ended(self, reason: str) -> None:
        """Abort what runs: the sandbox stops."""
        await self._executor.release()

    async def adopt(self, run: Run) -> None:
        """Take over a run of another engine, which may have left it frozen."""
        if run.id in self._backups.interrupted or run.id in self._backups.unfinished:
            self._backups.interrupted.discard(run.id)
            await run.jail.thaw()
        await self.begin(run)

    async def begin(self, run: Run) -> None:
        """Finish restores that a killed engine left."""
        for row in self._backups.unfinished.pop(run.id, ()):
            await RestoreJob(run, self._backups, row).resume()

    @contextlib.asynccontextmanager
    async def _exclusive(
        self, operation: BackupOperation, timeout: float | None
    ) -> AsyncIterator[None]:
        """Run after earlier operations; `timeout` includes the wait for them."""
        limit = check_timeout(timeout)
        self._operations.append(operation)
        try:
            async with asyncio.timeout(limit) as deadline, self._lock:
                operation.begun = True
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            verb = "backing up" if operation.operation == "create" else "restoring"
            raise DeadlineExceeded(
                f"{verb} {operation.path} took longer than {limit:g} s and was cancelled.",
                hint="Pass a longer timeout=, or exclude files with excludes=.",
                operation=f"{operation.operation}_backup",
                timeout=limit,
            ) from error
        finally:
            self._operations.remove(operation)

    async def _make(
        self,
        run: Run,
        row: BackupRow,
        options: ArchiveOptions,
        operation: BackupOperation,
        *,
        freeze: bool,
    ) -> Backup:
        part = self._backups.folder.part(row.id)
        target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            async with frozen(run) if freeze else contextlib.nullcontext():
                summary = await self._executor.run(
                    archive.write, row.path, target, options, operation
                )
        finally:
            os.close(target)
        complete = replace(
            row,
            size=summary.size,
            bytes=summary.bytes,
            files=summary.files,
            disk=summary.disk,
            checksum=summary.checksum,
        )
        operation.total = operation.bytes
        await self._backups.store.keep(complete, part)
        return await self._backups.finish(complete)

    async def _check_room(self, run: Run, row: BackupRow) -> None:
        """Raise if there is no room for a restored tree beside the one that it replaces."""
        limit = run.limits.disk
        used = await self._measure(run) if limit is not None else 0
        if limit is not None and used + row.disk > limit:
            raise LimitReached(
                f"the sandbox uses {used} bytes of disk, and backup {row.id} needs {row.disk} more "
                f"until it has replaced the old files: the limit is {limit}.",
                hint="Raise its disk limit, or remove the old files first.",
                limit="disk",
            )
        if available_bytes(run.directory) < row.disk:
            raise StorageFull(
                row.path,
                f"the host's disk has no room for backup {row.id} ({row.disk} bytes).",
                hint="Free disk space, for example by deleting backups or sandboxes.",
            )

    async def _root(self) -> tuple[int, Owner]:
        async with self._lifecycle.use() as run:
            return run.jail.root, run.jail.owner


def _check_name(name: str | None) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidOption(
            f"the name of a backup has 1 to {MAX_NAME} printable characters, not {name!r:.80}.",
            hint="Pass a short printable text, or omit it.",
            option="name",
            value=name,
        )
    return name


def _check_ttl(ttl: float) -> float:
    if not isinstance(ttl, int | float) or isinstance(ttl, bool) or not 0 < ttl <= MAX_TTL:
        raise InvalidOption(
            f"ttl is the number of seconds that a backup is kept, not {ttl!r}.",
            hint="Pass for example ttl=3 * 86400, or omit it to keep it until it is deleted.",
            option="ttl",
            value=ttl,
        )
    return float(ttl)


def _check_compression(level: int) -> int:
    if isinstance(level, bool) or not isinstance(level, int) or not 1 <= level <= MAX_COMPRESSION:
        raise InvalidOption(
            f"compression is a level of zstd from 1 to {MAX_COMPRESSION}, not {level!r}.",
            hint=f"1 is the fastest, {DEFAULT_COMPRESSION} the default.",
            option="compression",
            value=level,
        )
    return level
