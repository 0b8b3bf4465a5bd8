"""The buckets that are mounted in one sandbox: kept in its record, mounted in each of its runs.

A mount is verified before it is said to be one, and so is its end. One that was made comes
back when the sandbox wakes, when the engine was killed, and when its own process was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.files.rooted import Rooted
from smokebox.engine.mounts import daemon_client
from smokebox.engine.mounts.attachment import is_mounted
from smokebox.engine.mounts.request import MountRequest, check_host, parse_path
from smokebox.engine.record.rows import MountRow, delete, put
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

    from smokebox.engine.jail.api import Jail, Owner
    from smokebox.engine.mounts.daemon_client import MountDaemon
    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Run
    from smokebox.engine.workers import Workers

T = TypeVar("T")

_log = logging.getLogger("smokebox.engine")

SPOOL = "spool"
# What a sandbox may write when it is told to end, before its mounts are cut off.
SETTLE_SECONDS = 5.0
# A look at what is mounted, which its own process answers.
_LOOK_SECONDS = 10.0
_END_SECONDS = 10.0


class Mounts:
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
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._cutting: asyncio.TimerHandle | None = None

    async def mount(self, request: MountRequest) -> Mount:
        """Mount a bucket on a directory, which is made if need be; wakes the sandbox.

        What the directory holds is hidden meanwhile. Safe to repeat; raises `Conflict` where
        another bucket is mounted.
        """
        check_host()
        return await asyncio.shield(self._keep(self._mount(request)))

    async def unmount(self, path: str, *, force: bool = False) -> None:
        """Unmount what is mounted at a path; all that was written is in the bucket then.

        Raises `Conflict` while somebody uses it. With `force` it is gone for who comes, and
        ends with the last who uses it. Wakes nothing.
        """
        path = parse_path(path, self._cwd())
        await asyncio.shield(self._keep(self._unmount(path, force=force)))

    async def list(self) -> list[Mount]:
        """What is mounted, or will be when the sandbox wakes, in the order of mounting."""
        return [self._described(row) for row in (await self._load()).values()]

    async def begin(self, run: Run) -> None:
        """Mount in a run that starts what is in the record, without asking the stores."""
        for row in list((await self._load()).values()):
            if row.path not in self._daemons:
                await self._restore(run, row)

    async def adopt(self, run: Run) -> None:
        """Find what serves the mounts of a run of another engine's time, or mount again."""
        for row in list((await self._load()).values()):
            daemon = (
                daemon_client.MountDaemon.find(row.pid, row.started)
                if row.pid is not None
                else None
            )
            if daemon is not None and row.generation == run.generation:
                self._watch(row.path, daemon, run.jail)
                continue
            with contextlib.suppress(SmokeboxError):
                await daemon_client.unmount(run.jail, row.path, lazy=True)
            await self._restore(run, row)

    async def settle(self) -> None:
        """The run is to end: what hangs in a mount hangs for so long only."""
        if self._daemons and self._cutting is None:
            loop = asyncio.get_running_loop()
            self._cutting = loop.call_later(SETTLE_SECONDS, self._cut)

    async def ended(self, reason: str) -> None:
        """A run is over, and with it all that was mounted in it."""
        self._cut()
        for daemon in list(self._daemons.values()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await daemon.wait()
        self._daemons.clear()

    async def close(self) -> None:
        """Let go, and leave what is mounted."""
        if self._cutting is not None:
            self._cutting.cancel()
        daemons, self._daemons = self._daemons, {}
        for daemon in daemons.values():
            daemon.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _mount(self, request: MountRequest) -> Mount:
        async with self._use() as run, self._changing:
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
                return self._described(known)
            _check_tier(run)
            await self._make_directory(run.jail, request.path)
            # Before it is there: one that nobody knows of would outlive whoever made it.
            await self._record.write(put(row))
            try:
                made = await self._serve(run, row, check=True)
            except BaseException:
                await self._record.write(delete(MountRow, self.id, row.path))
                raise
            rows[row.path] = made
            return self._described(made)

    async def _unmount(self, path: str, *, force: bool) -> None:
        async with self._changing:
            rows = await self._load()
            if path not in rows:
                raise NotFound(
                    f"nothing is mounted at {path} in sandbox {self.id}.",
                    hint="`smokebox mounts` lists what is.",
                    kind="mount",
                    name=path,
                )
            run = self._run()
            if run is not None:
                await self._take_off(run, path, force=force)
            await self._record.write(delete(MountRow, self.id, path))
            del rows[path]

    async def _take_off(self, run: Run, path: str, *, force: bool) -> None:
        daemon = self._daemons.get(path)
        try:
            await daemon_client.unmount(run.jail, path, lazy=force)
        except PathError:
            # Its directory was moved inside: what cannot be taken off by its name is cut off.
            if not force or daemon is None:
                raise
            daemon.kill()
        if await self._is_mounted(run.jail, path):
            raise self._unverified(path, "is still mounted")
        self._daemons.pop(path, None)
        if daemon is not None and force:
            daemon.close()
        elif daemon is not None:
            # It ends once it has nothing more to put.
            async with asyncio.timeout(_END_SECONDS):
                await daemon.wait()

    async def _restore(self, run: Run, row: MountRow) -> None:
        try:
            await self._make_directory(run.jail, row.path)
            made = await self._serve(run, row, check=False)
        except SmokeboxError as error:
            raise ServiceUnavailable(
                f"sandbox {self.id} cannot have {row.path} mounted: {error}",
                hint=f"Mend that, or unmount {row.path}.",
                service="mount",
                path=row.path,
            ) from error
        (await self._load())[row.path] = made

    async def _serve(self, run: Run, row: MountRow, *, check: bool) -> MountRow:
        spool = await asyncio.to_thread(_spool, run)
        words = {**row.request.words(), "check": check, "room": run.limits.disk}
        daemon = await daemon_client.serve(run.jail, words, spool)
        try:
            if not await self._is_mounted(run.jail, row.path):
                raise self._unverified(row.path, "was not mounted")
            made = replace(row, generation=run.generation, pid=daemon.pid, started=daemon.started)
            await self._record.write(put(made))
        except BaseException:
            with contextlib.suppress(SmokeboxError):
                await daemon_client.unmount(run.jail, row.path, lazy=True)
            daemon.kill()
            raise
        self._watch(row.path, daemon, run.jail)
        return made

    async def _make_directory(self, jail: Jail, path: str) -> None:
        async def root() -> tuple[int, Owner]:
            return jail.root, jail.owner

        await RootExecutor(root, self._workers).run(Rooted.make_directory, path, recursive=True)

    async def _is_mounted(self, jail: Jail, path: str) -> bool:
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                return await asyncio.to_thread(is_mounted, jail.root, path)
        except (OSError, TimeoutError):
            return False

    def _watch(self, path: str, daemon: MountDaemon, jail: Jail) -> None:
        self._daemons[path] = daemon
        self._keep(self._revive(path, daemon, jail))

    async def _revive(self, path: str, daemon: MountDaemon, jail: Jail) -> None:
        """Mount again where what serves it was killed, while its run goes on."""
        await daemon.wait()
        async with self._changing:
            run = self._run()
            row = (await self._load()).get(path)
            current = run is not None and run.jail is jail and self._cutting is None
            if self._daemons.get(path) is not daemon or run is None or not current or row is None:
                return
            del self._daemons[path]
            _log.warning("sandbox %s: what served %s ended, and is begun again", self.id, path)
            with contextlib.suppress(SmokeboxError):
                await daemon_client.unmount(jail, path, lazy=True)
            await self._restore(run, row)

    async def _load(self) -> dict[str, MountRow]:
        if self._rows is None:
            found = await self._record.rows(MountRow, self.id)
            if self._rows is None:
                self._rows = {row.path: row for row in found}
        return self._rows

    def _cut(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None
        for daemon in self._daemons.values():
            daemon.kill()

    def _described(self, row: MountRow) -> Mount:
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
            f"{path} of sandbox {self.id} {what}, though nothing refused it.",
            hint="Try again; the sandbox may have moved the directory.",
            service="mount",
        )

    def _keep(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("sandbox %s: a mount failed: %s", self.id, error)


def _spool(run: Run) -> str:
    """A directory for what is written and not put yet, of who serves it."""
    path = f"{run.directory}/{SPOOL}"
    os.makedirs(path, mode=0o700, exist_ok=True)
    owner = run.jail.owner
    if owner.count > 1:
        os.chown(path, owner.uid, owner.gid)
    return path


def _check_tier(run: Run) -> None:
    if run.jail.state.tier != "namespaces":
        raise Unsupported(
            f"a sandbox of the tier {run.jail.state.tier!r} has no buckets mounted.",
            hint="Use the tier 'namespaces', or copy what is needed.",
            operation="mount",
            sandbox=run.id,
        )
