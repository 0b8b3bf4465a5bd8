"""Buckets mounted in one sandbox: stored in the record, and mounted in each of its runs.

Mounts and unmounts are verified before success is reported. A mount is restored when the sandbox
wakes, and when the engine or the mount's daemon was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.mounts import daemon_client
from smokebox.engine.mounts.fuse_mount import is_mounted
from smokebox.engine.mounts.request import MountRequest, check_host, parse_path
from smokebox.engine.record.rows import MountRow, delete, put
from smokebox.engine.run import RunPart
from smokebox.errors import (
    Conflict,
    NotFound,
    PathError,
    ServiceUnavailable,
    SmokeboxError,
    Unsupported,
)
from smokebox.types import Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.jail.spec import Owner
    from smokebox.engine.mounts.daemon_client import MountDaemon
    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Run
    from smokebox.engine.workers import Workers

T = TypeVar("T")

_log = logging.getLogger("smokebox.engine")

SPOOL = "spool"
# Time to flush writes at the end of a run, before its daemons are killed.
FLUSH_SECONDS = 5.0
# Time for a daemon to respond to the check of its mount.
_CHECK_SECONDS = 10.0
_END_SECONDS = 10.0


class Mounts(RunPart):
    """The mounts of one sandbox, by path."""

    def __init__(
        self,
        *,
        id: str,
        record: Record,
        use: Callable[[], AbstractAsyncContextManager[Run]],
        run: Callable[[], Run | None],
        workers: Workers,
        cwd: Callable[[], str],
    ) -> None:
        self.id = id
        self._record = record
        self._use = use
        self._run = run
        self._workers = workers
        self._cwd = cwd
        self._rows: dict[str, MountRow] | None = None
        self._daemons: dict[str, MountDaemon] = {}
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._kill_timer: asyncio.TimerHandle | None = None

    async def mount(self, request: MountRequest) -> Mount:
        """Mount a bucket on a directory, which is created if needed; wakes the sandbox.

        The content of the directory is hidden meanwhile. Safe to repeat; raises `Conflict` if
        another bucket is mounted there.
        """
        check_host()
        return await asyncio.shield(self._start(self._mount(request)))

    async def unmount(self, path: str, *, force: bool = False) -> None:
        """Unmount a path after flushing pending writes. Does not wake the sandbox.

        Raises `Conflict` while it is in use. With `force` it is detached at once, and ends with
        the last process that uses it.
        """
        path = parse_path(path, self._cwd())
        await asyncio.shield(self._start(self._unmount(path, force=force)))

    async def list(self) -> list[Mount]:
        """Return the mounts, including those of a sleeping sandbox, in the order of mounting."""
        return [self._describe(row) for row in (await self._load()).values()]

    async def begin(self, run: Run) -> None:
        """Mount the buckets of the record in a new run, without contacting the stores."""
        for row in list((await self._load()).values()):
            if row.path not in self._daemons:
                await self._restore(run, row)

    async def adopt(self, run: Run) -> None:
        """Find the daemons of a run that another engine started, or mount again."""
        for row in list((await self._load()).values()):
            daemon = None
            if row.pid is not None and row.generation == run.generation:
                daemon = daemon_client.MountDaemon.find(row.pid, row.started)
            if daemon is not None:
                self._watch(row.path, daemon, run.jail)
                continue
            with contextlib.suppress(SmokeboxError):
                await daemon_client.unmount(run.jail, row.path, lazy=True)
            await self._restore(run, row)

    async def before_end(self) -> None:
        """Kill the daemons after a while, so that no mount blocks the end of the run."""
        if self._daemons and self._kill_timer is None:
            loop = asyncio.get_running_loop()
            self._kill_timer = loop.call_later(FLUSH_SECONDS, self._kill_daemons)

    async def ended(self, reason: str) -> None:
        """End the daemons of a run that ended."""
        self._kill_daemons()
        for daemon in list(self._daemons.values()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await daemon.wait()
        self._daemons.clear()

    async def aclose(self) -> None:
        """Release the daemons, and leave them running."""
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        daemons, self._daemons = self._daemons, {}
        for daemon in daemons.values():
            daemon.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _mount(self, request: MountRequest) -> Mount:
        async with self._use() as run, self._lock:
            rows = await self._load()
            row = MountRow(
                sandbox_id=self.id, path=request.path, request=request, generation=run.generation
            )
            known = rows.get(request.path)
            if known is not None:
                if known.request != request:
                    raise Conflict(
                        f"{request.path} is taken by the bucket {known.request.bucket!r}.",
                        hint="Unmount that first, or mount on another directory.",
                        kind="mount",
                        name=request.path,
                    )
                return self._describe(known)
            _check_tier(run)
            await self._make_directory(run.jail, request.path)
            # Before mounting: a mount that is not recorded would outlive a killed engine.
            await self._record.write(put(row))
            try:
                served = await self._serve(run, row, check=True)
            except BaseException:
                await self._record.write(delete(MountRow, self.id, row.path))
                raise
            rows[row.path] = served
            return self._describe(served)

    async def _unmount(self, path: str, *, force: bool) -> None:
        async with self._lock:
            rows = await self._load()
            if path not in rows:
                raise NotFound(
                    f"nothing is mounted at {path} in sandbox {self.id}.",
                    hint="List the mounts with `smokebox mounts`.",
                    kind="mount",
                    name=path,
                )
            run = self._run()
            if run is not None:
                await self._unmount_in(run, path, force=force)
            await self._record.write(delete(MountRow, self.id, path))
            del rows[path]

    async def _unmount_in(self, run: Run, path: str, *, force: bool) -> None:
        daemon = self._daemons.get(path)
        try:
            await daemon_client.unmount(run.jail, path, lazy=force)
        except PathError:
            # The directory was moved in the sandbox, so that its path does not lead to the mount.
            if not force or daemon is None:
                raise
            daemon.kill()
        if await self._is_mounted(run.jail, path):
            raise self._unverified(path, "is still mounted")
        self._daemons.pop(path, None)
        if daemon is not None and force:
            daemon.close()
        elif daemon is not None:
            # It ends after its last upload.
            async with asyncio.timeout(_END_SECONDS):
                await daemon.wait()

    async def _restore(self, run: Run, row: MountRow) -> None:
        try:
            await self._make_directory(run.jail, row.path)
            served = await self._serve(run, row, check=False)
        except SmokeboxError as error:
            raise ServiceUnavailable(
                f"{row.path} cannot be mounted in sandbox {self.id}: {error}",
                hint=f"Fix that, or unmount {row.path}.",
                service="mount",
                path=row.path,
            ) from error
        (await self._load())[row.path] = served

    async def _serve(self, run: Run, row: MountRow, *, check: bool) -> MountRow:
        spool = await asyncio.to_thread(_make_spool, run)
        options = {"check": check, "spool_limit": run.limits.disk}
        daemon = await daemon_client.serve(run.jail, asdict(row.request) | options, spool)
        try:
            if not await self._is_mounted(run.jail, row.path):
                raise self._unverified(row.path, "was not mounted")
            served = replace(row, generation=run.generation, pid=daemon.pid, started=daemon.started)
            await self._record.write(put(served))
        except BaseException:
            with contextlib.suppress(SmokeboxError):
                await daemon_client.unmount(run.jail, row.path, lazy=True)
            daemon.kill()
            raise
        self._watch(row.path, daemon, run.jail)
        return served

    async def _make_directory(self, jail: Jail, path: str) -> None:
        async def root() -> tuple[int, Owner]:
            return jail.root, jail.owner

        await RootExecutor(root, self._workers).run(
            RootedFiles.make_directory, path, recursive=True
        )

    async def _is_mounted(self, jail: Jail, path: str) -> bool:
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                return await asyncio.to_thread(is_mounted, jail.root, path)
        except (OSError, TimeoutError):
            return False

    def _watch(self, path: str, daemon: MountDaemon, jail: Jail) -> None:
        self._daemons[path] = daemon
        self._start(self._restart(path, daemon, jail))

    async def _restart(self, path: str, daemon: MountDaemon, jail: Jail) -> None:
        """Mount again when a daemon was killed during its run."""
        await daemon.wait()
        async with self._lock:
            run = self._run()
            row = (await self._load()).get(path)
            current = run is not None and run.jail is jail and self._kill_timer is None
            if self._daemons.get(path) is not daemon or run is None or not current or row is None:
                return
            del self._daemons[path]
            _log.warning("sandbox %s: the daemon of %s ended and is restarted", self.id, path)
            with contextlib.suppress(SmokeboxError):
                await daemon_client.unmount(jail, path, lazy=True)
            await self._restore(run, row)

    async def _load(self) -> dict[str, MountRow]:
        if self._rows is None:
            found = await self._record.rows(MountRow, self.id)
            if self._rows is None:
                self._rows = {row.path: row for row in found}
        return self._rows

    def _kill_daemons(self) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None
        for daemon in self._daemons.values():
            daemon.kill()

    def _describe(self, row: MountRow) -> Mount:
        request = row.request
        return Mount(
            path=row.path,
            bucket=request.name or request.bucket,
            prefix=request.prefix,
            endpoint=None if request.name else request.access.endpoint,
            read_only=request.read_only,
            active=row.path in self._daemons,
        )

    def _unverified(self, path: str, what: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"{path} of sandbox {self.id} {what}, although no call failed.",
            hint="Try again; a process in the sandbox may have moved the directory.",
            service="mount",
        )

    def _start(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("sandbox %s: a mount failed: %s", self.id, error)


def _make_spool(run: Run) -> str:
    """Create the directory of pending writes, owned by the user of the daemon."""
    path = f"{run.directory}/{SPOOL}"
    os.makedirs(path, mode=0o700, exist_ok=True)
    owner = run.jail.owner
    if owner.count > 1:
        os.chown(path, owner.uid, owner.gid)
    return path


def _check_tier(run: Run) -> None:
    if run.jail.state.tier != "namespaces":
        raise Unsupported(
            f"buckets cannot be mounted in a sandbox of the tier {run.jail.state.tier!r}.",
            hint="Use the tier 'namespaces', or copy the files.",
            operation="mount",
            sandbox=run.id,
        )
