"""Automatic checkpoints of one sandbox: snapshots at an interval, while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from smokebox.engine.run import RunPart
from smokebox.engine.snapshots.retention import Retention
from smokebox.engine.snapshots.snapshots import random_snapshot_id
from smokebox.errors import SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from smokebox.engine.context import EngineContext
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.run import Run
    from smokebox.engine.snapshots.checkpoint_rule import CheckpointRule
    from smokebox.engine.snapshots.sandbox_snapshots import SandboxSnapshots

# One that is due when a sandbox wakes does not slow down its first call.
_AFTER_WAKE_SECONDS = 1.0
# At most this share of the time is spent on them.
_SHARE = 0.1

_log = logging.getLogger("smokebox.engine")


class Checkpoints(RunPart):
    """Makes snapshots of the origin "interval", as the option `checkpoints` of the sandbox says.

    They are no use of the sandbox: it falls asleep as it would without them, and is not woken.
    """

    def __init__(
        self, lifecycle: Lifecycle, context: EngineContext, snapshots: SandboxSnapshots
    ) -> None:
        self._lifecycle = lifecycle
        self._context = context
        self._snapshots = snapshots
        self._rule: CheckpointRule | None = None
        self._timer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.error: str | None = None

    async def begin(self, run: Run) -> None:
        """Start the timer, or restart it with another rule."""
        rule = self._lifecycle.checkpoints
        if rule == self._rule and self._timer is not None:
            return
        self._stop()
        self._rule, self.error = rule, None
        if rule.every is not None:
            self._timer = asyncio.create_task(self._repeat(rule, rule.every))
            self._tasks.add(self._timer)
            self._timer.add_done_callback(self._tasks.discard)

    async def adopt(self, run: Run) -> None:
        """Start the timer of a run that another engine started."""
        await self.begin(run)

    async def ended(self, reason: str) -> None:
        """Stop the timer."""
        self._stop()

    async def aclose(self) -> None:
        """Stop the timer, and wait for what it was doing."""
        self._stop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    async def _repeat(self, rule: CheckpointRule, every: float) -> None:
        delay = await self._first_delay(every)
        while True:
            await asyncio.sleep(delay)
            started_at = time.monotonic()
            await self._take(rule)
            took = time.monotonic() - started_at
            delay = max(every - took, took / _SHARE)

    async def _first_delay(self, every: float) -> float:
        """Return the seconds to the first one of a run: the interval may have begun before it."""
        with contextlib.suppress(SmokeboxError):
            row = await self._snapshots.row()
            latest = await self._context.snapshots.latest(row.id, "interval")
            begun_at = row.created_at if latest is None else latest.created_at
            left = every - max(time.time() - begun_at, 0.0)
            return max(left, min(every, _AFTER_WAKE_SECONDS))
        return every

    async def _take(self, rule: CheckpointRule) -> None:
        retention = Retention(keep_last=rule.keep_last, keep_for=rule.keep_for)
        id = random_snapshot_id()
        try:
            freed = await self._snapshots.outdated(retention, origin="interval", upcoming=1)
            row = await self._snapshots.row()
            async with self._lifecycle.hold() as run, self._context.admit_snapshot(row, id, freed):
                if run is not None:
                    await self._snapshots.checkpoint(id, run, retention)
        except SandboxGone:
            # Its files are those of a sandbox that sleeps, or none.
            return
        except (SmokeboxError, OSError) as error:
            if self.error is None:
                _log.warning("sandbox %s has no checkpoint: %s", self._lifecycle.id, error)
            self.error = str(error)
        else:
            self.error = None
