"""Schedules of workflows: a cron expression, a time zone and a policy for missed runs."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from uuid import NAMESPACE_URL, uuid5
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from smokebox.app.inbox import WorkTarget
from smokebox.app.source_file import source_location
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from smokebox.app.inbox import AppInbox
    from smokebox.app.project import AppProject

Missed: TypeAlias = Literal["once", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Cron schedule. Runs missed during downtime are replaced by one (`once`) or none (`skip`)."""

    cron: str
    timezone: str = "UTC"
    missed: Missed = "once"

    def next_after(self, moment: float) -> float | None:
        """Return the next time it is due as a Unix timestamp; None if never."""
        zone = ZoneInfo(self.timezone)
        start = datetime.fromtimestamp(moment, UTC).astimezone(zone)
        try:
            return next(CronSim(self.cron, start)).timestamp()
        except StopIteration:
            return None

    def __str__(self) -> str:
        return f"{self.cron} ({self.timezone})"


def parse_schedule(module: ModuleType, file: Path) -> Schedule | None:
    """Read `schedule`, `timezone` and `missed` from the top level of a file."""
    cron = getattr(module, "schedule", None)
    if cron is None:
        return None
    zone: Any = getattr(module, "timezone", "UTC")
    missed: Any = getattr(module, "missed", "once")
    try:
        CronSim(cron, datetime.now(UTC))
    except (CronSimError, AttributeError, TypeError):
        raise InvalidOption(
            f"{source_location(file, 'schedule')}: schedule must be a cron expression, "
            f"not {cron!r:.80}.",
            hint='It has five fields: schedule = "0 9 * * 1-5" is 9:00 on weekdays.',
            option="schedule",
            value=cron,
        ) from None
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, TypeError, OSError):
        raise InvalidOption(
            f"{source_location(file, 'timezone')}: there is no time zone {zone!r:.80}.",
            hint='Use an IANA name, for example timezone = "Europe/Lisbon".',
            option="timezone",
            value=zone,
        ) from None
    if missed not in ("once", "skip"):
        raise InvalidOption(
            f"{source_location(file, 'missed')}: missed must be 'once' or 'skip', "
            f"not {missed!r:.80}.",
            hint="It decides whether a run that was due while the app was down runs afterwards.",
            option="missed",
            value=missed,
        )
    return Schedule(cron=cron, timezone=zone, missed=missed)


# Less than cron's resolution of a minute; also the longest delay before a reload is noticed.
_TICK = 5.0
# A run that is later than this counts as missed.
LATE_SECONDS = 60.0

_log = logging.getLogger("smokebox.app")


class Scheduler:
    """Accepts runs of workflows when their schedules are due."""

    def __init__(
        self,
        inbox: AppInbox,
        project: Callable[[], AppProject],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._inbox = inbox
        self._project = project
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start accepting runs."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop accepting runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def tick(self) -> float:
        """Accept runs that are due, and return the seconds until the next, at most `_TICK`."""
        now = self._clock()
        wait = _TICK
        for name, workflow in self._project().workflows.items():
            if workflow.schedule is not None:
                due = await self._check(name, workflow.schedule, now)
                wait = wait if due is None else min(wait, due - now)
        return max(0.05, wait)

    async def _check(self, name: str, schedule: Schedule, now: float) -> float | None:
        cron = str(schedule)
        following = schedule.next_after(now)
        if following is None:
            return None
        due = await self._inbox.due(name, cron, following)
        if due > now:
            return due
        if now - due <= LATE_SECONDS or schedule.missed == "once":
            await self._accept(name, due)
        # Stored after acceptance: if killed in between, it is accepted again under the same id.
        await self._inbox.set_due(name, cron, following)
        return following

    async def _accept(self, name: str, due: float) -> None:
        moment = datetime.fromtimestamp(due, UTC).isoformat()
        # Two processes that see the same due time accept the same run.
        id = uuid5(NAMESPACE_URL, f"smokebox:schedule:{name}:{moment}").hex
        target = WorkTarget(kind="workflow", name=name, id=id)
        await self._inbox.accept(target, {"scheduled_at": moment}, key="schedule")

    async def _run(self) -> None:
        while True:
            wait = _TICK
            try:
                wait = await self.tick()
            except Exception:
                _log.exception("cannot check the schedules")
            await asyncio.sleep(wait)
