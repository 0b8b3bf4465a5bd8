"""Enforcement of limits that the kernel does not: disk, and memory where there is no cgroup."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from smokebox.engine.disk import DiskWatch
from smokebox.engine.jail.cgroup import buffers_limit
from smokebox.engine.jail.kernfs import network_buffers
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.run import Run

MEMORY_SECONDS = 0.5


class ResourceGuard:
    """Ends the run of a sandbox that exceeds a limit, with a reason."""

    def __init__(self, sandboxes: str) -> None:
        self._disk = DiskWatch(sandboxes, over=self._over, low=self._low)
        self._lifecycles: dict[str, Lifecycle] = {}
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the watches."""
        self._keep(asyncio.create_task(self._disk.run()))
        self._keep(asyncio.create_task(self._watch_memory()))

    def watch(self, lifecycle: Lifecycle, run: Run) -> None:
        """Watch a run. Call again when its limits change."""
        key = run.jail.state.key
        self._lifecycles[key], self._runs[key] = lifecycle, run
        fresh = run.generation == 1 and self._disk.used(key) is None
        # Only what the sandbox wrote: its logs and spilled output have their own bounds.
        self._disk.watch(
            key, f"{run.directory}/data", run.limits.disk, fresh=fresh, pids=run.jail.pids
        )

    def forget(self, run: Run) -> None:
        """Stop watching a run."""
        key = run.jail.state.key
        self._disk.forget(key)
        self._lifecycles.pop(key, None)
        self._runs.pop(key, None)

    async def aclose(self) -> None:
        """Stop the watches."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _over(self, key: str, used: int) -> None:
        run = self._runs.get(key)
        if run is not None and run.limits.disk is not None:
            limit = run.limits.disk
            self._stop(key, f"its files take {used / 1e9:.2f} GB of disk, above {limit / 1e9:g} GB")

    def _low(self, key: str, used: int) -> None:
        self._stop(key, f"the host's disk is nearly full, and it had grown to {used / 1e9:.2f} GB")

    def _stop(self, key: str, reason: str) -> None:
        lifecycle = self._lifecycles.get(key)
        if lifecycle is not None:
            lifecycle.stop(reason)

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
