"""Runs workflows when their schedules say so, each time once, in however many processes."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import NAMESPACE_URL, uuid5

from smokebox.app.submission import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.app.cron import Schedule
    from smokebox.app.inbox import Inbox
    from smokebox.app.project import Project

# Less than the minute that cron counts in; also how late a change of the files is seen.
_TICK = 5.0
# Later than this a run counts as missed.
LATE_SECONDS = 60.0

_log = logging.getLogger("smokebox.app")


class Scheduler:
    """Looks at the clock, and accepts a run of what is due."""

    def __init__(
        self,
        inbox: Inbox,
        project: Callable[[], Project],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._inbox = inbox
        self._project = project
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Accept nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def tick(self) -> float:
        """Accept what is due; gives the seconds until the next is, at most `_TICK`."""
        now = self._clock()
        wait = _TICK
        for name, workflow in self._project().workflows.items():
            if workflow.schedule is not None:
                due = await self._look(name, workflow.schedule, now)
                wait = wait if due is None else min(wait, due - now)
        return max(0.05, wait)

    async def _look(self, name: str, schedule: Schedule, now: float) -> float | None:
        line = str(schedule)
        following = schedule.after(now)
        if following is None:
            return None
        due = await self._inbox.due(name, line, following)
        if due > now:
            return due
        if now - due <= LATE_SECONDS or schedule.missed == "once":
            await self._accept(name, due)
        # After it was accepted: killed in between, it is accepted again under the same id.
        await self._inbox.set_due(name, line, following)
        return following

    async def _accept(self, name: str, due: float) -> None:
        moment = datetime.fromtimestamp(due, UTC).isoformat()
        # Two processes that see it due at once mean the same run.
        id = uuid5(NAMESPACE_URL, f"smokebox:schedule:{name}:{moment}").hex
        target = Target(kind="workflow", name=name, id=id)
        await self._inbox.accept(target, {"scheduled_at": moment}, key="schedule")

    async def _run(self) -> None:
        while True:
            wait = _TICK
            try:
                wait = await self.tick()
            except Exception:
                _log.exception("the schedules cannot be looked at")
            await asyncio.sleep(wait)
