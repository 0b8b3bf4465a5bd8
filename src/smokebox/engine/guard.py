"""Enforcement of limits that the kernel does not: disk, and memory where there is no cgroup."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.disk import DiskWatch, TreeUsage
from smokebox.engine.disk_ledger import DiskBudget
from smokebox.engine.jail.cgroup import buffers_limit
from smokebox.engine.jail.kernfs import network_buffers
from smokebox.errors import LimitReached, SmokeboxError

if TYPE_CHECKING:
    from smokebox.engine.record.rows import SandboxRow, StopCause
    from smokebox.engine.run import Run
    from smokebox.engine.sandbox_storage import SandboxStorage

MEMORY_SECONDS = 0.5


class RunStopper(Protocol):
    """Ends a run that exceeds a limit, such as the `Lifecycle` of its sandbox."""

    def stop(self, reason: str, *, cause: StopCause | None = None) -> None:
        """End the run."""


class ResourceGuard:
    """Ends the run of a sandbox that exceeds a limit, with a reason."""

    def __init__(self, storage: SandboxStorage) -> None:
        self._storage = storage
        self._disk = DiskWatch(storage.plain, pool=storage.pool, over=self._over, low=self._low)
        self._stoppers: dict[str, RunStopper] = {}
        self._runs: dict[str, Run] = {}
        # Reasons of sandboxes that run no programs until they are below their disk limit again.
        self._full: dict[str, str] = {}
        # Bytes of snapshots, by the id of their sandbox.
        self._stored: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the watches."""
        self._keep(asyncio.create_task(self._disk.run()))
        self._keep(asyncio.create_task(self._watch_memory()))

    def watch(self, stopper: RunStopper, run: Run, *, before: SandboxRow | None = None) -> None:
        """Watch a run. Call again when its limits change.

        `before` is the row of the sandbox before the run. After one that was stopped for its disk
        use, the run starts programs only once it is below its limit.
        """
        key = run.jail.state.key
        if before is not None and before.stop_cause == "disk":
            self._full[key] = before.stop_reason or ""
        self._stoppers[key], self._runs[key] = stopper, run
        self._watch_disk(run)

    def set_stored(self, id: str, stored: int) -> None:
        """Set the bytes of the snapshots of a sandbox, which count against its disk limit."""
        self._stored[id] = stored
        for run in self._runs.values():
            if run.id == id:
                self._watch_disk(run)
                return

    def _watch_disk(self, run: Run) -> None:
        key, limit = run.jail.state.key, run.limits.disk
        if limit is not None:
            limit = max(limit - self._stored.get(run.id, 0), 0)
        fresh = run.generation == 1 and self._disk.used(key) is None
        read = functools.partial(self._read_quota, key)
        # Only what the sandbox wrote: its logs and spilled output have their own bounds.
        self._disk.watch(
            key,
            f"{run.directory}/data",
            limit,
            fresh=fresh,
            pids=run.jail.pids,
            read=read if read() is not None else None,
        )

    def forget(self, run: Run) -> None:
        """Stop watching a run."""
        key = run.jail.state.key
        self._disk.forget(key)
        self._stoppers.pop(key, None)
        self._runs.pop(key, None)
        self._full.pop(key, None)
        self._stored.pop(run.id, None)

    def budget(self, run: Run) -> DiskBudget:
        """Return a budget for one write of the engine, which its caller closes."""
        key = run.jail.state.key
        return DiskBudget(
            run.id, self._disk.ledger(key), functools.partial(self._disk.measure, key)
        )

    async def over_disk(self, run: Run) -> str | None:
        """Return why the run before ended, if that was its disk use and it is still too high."""
        key = run.jail.state.key
        with contextlib.suppress(LimitReached):
            await self.check_disk(key, run.id)
        return self._full.get(key)

    async def check_disk(self, key: str, id: str) -> None:
        """Raise `LimitReached` for a sandbox that was stopped above its disk limit and still is."""
        if key not in self._full:
            return
        await self._disk.measure(key)
        ledger = self._disk.ledger(key)
        if ledger.limit is None or ledger.used <= ledger.limit:
            self._full.pop(key, None)
            return
        raise LimitReached(
            f"sandbox {id} uses {ledger.used} bytes of disk, above its limit of {ledger.limit}, "
            "so it starts no programs.",
            hint="Remove files through the files API, for example with rm, or raise its limit: "
            "limits={'disk': '16GB'}.",
            limit="disk",
        )

    async def aclose(self) -> None:
        """Stop the watches."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _over(self, key: str, used: int) -> None:
        run = self._runs.get(key)
        # One that is full already runs no programs, so that its owner can remove files.
        if run is not None and run.limits.disk is not None and key not in self._full:
            limit = run.limits.disk
            reason = f"its files take {used / 1e9:.2f} GB of disk, above {limit / 1e9:g} GB"
            self._stop(key, reason, cause="disk")

    def _low(self, key: str, used: int) -> None:
        self._stop(key, f"the host's disk is nearly full, and it had grown to {used / 1e9:.2f} GB")

    def _stop(self, key: str, reason: str, *, cause: StopCause | None = None) -> None:
        stopper = self._stoppers.get(key)
        if stopper is not None:
            stopper.stop(reason, cause=cause)

    def _read_quota(self, key: str) -> TreeUsage | None:
        state = self._storage.quota(key)
        if state is None:
            return None
        return TreeUsage(bytes=state.quota.bytes, inodes=state.quota.inodes)

    async def _watch_memory(self) -> None:
        """Bound the memory that the kernel does not.

        Rlimits bind only each process. The limit of cgroup v1 on network buffers slows connections
        down, but leaves a minimum to each.
        """
        while True:
            await asyncio.sleep(MEMORY_SECONDS)
            buffers = network_buffers()
            for key, run in list(self._runs.items()):
                limit = run.limits.memory
                if limit is None:
                    continue
                enforcement, allowed = run.jail.state.enforcement, limit
                if enforcement != "rlimits":
                    # It cannot have more of them than the whole host.
                    if enforcement == "cgroup-v2" or buffers <= buffers_limit(limit):
                        continue
                    allowed += buffers_limit(limit)
                with contextlib.suppress(SmokeboxError, OSError):
                    used = (await run.jail.stats()).memory
                    if used is not None and used > allowed:
                        self._stop(key, f"it took {used >> 20} MiB of memory, above {limit >> 20}")

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
