"""When a workflow runs by itself: a line of cron, a time zone, and what becomes of missed runs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from smokebox.app.located import place_of
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

Missed: TypeAlias = Literal["once", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`missed` is what is done when the app comes back after it was due: run it once, or not."""

    line: str
    timezone: str = "UTC"
    missed: Missed = "once"

    def after(self, moment: float) -> float | None:
        """When it is due next, in seconds since 1970; None for never again."""
        zone = ZoneInfo(self.timezone)
        start = datetime.fromtimestamp(moment, UTC).astimezone(zone)
        try:
            return next(CronSim(self.line, start)).timestamp()
        except StopIteration:
            return None

    def __str__(self) -> str:
        return f"{self.line} ({self.timezone})"


def parse_schedule(module: ModuleType, file: Path) -> Schedule | None:
    """What a file says: `schedule`, `timezone` and `missed` at its top level."""
    line = getattr(module, "schedule", None)
    if line is None:
        return None
    zone: Any = getattr(module, "timezone", "UTC")
    missed: Any = getattr(module, "missed", "once")
    try:
        CronSim(line, datetime.now(UTC))
    except (CronSimError, AttributeError, TypeError):
        raise InvalidOption(
            f"{place_of(file, 'schedule')}: schedule is a line of cron, not {line!r:.80}.",
            hint='It has five fields: schedule = "0 9 * * 1-5" is nine o\'clock on weekdays.',
            option="schedule",
            value=line,
        ) from None
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, TypeError, OSError):
        raise InvalidOption(
            f"{place_of(file, 'timezone')}: there is no time zone {zone!r:.80}.",
            hint='Write for example timezone = "Europe/Lisbon".',
            option="timezone",
            value=zone,
        ) from None
    if missed not in ("once", "skip"):
        raise InvalidOption(
            f"{place_of(file, 'missed')}: missed is 'once' or 'skip', not {missed!r:.80}.",
            hint="It says what becomes of runs that were due while the app was down.",
            option="missed",
            value=missed,
        )
    return Schedule(line=line, timezone=zone, missed=missed)
