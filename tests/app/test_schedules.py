"""Schedules: each time runs once, in any number of processes, and missed runs follow the policy."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
import pytest_asyncio

from app.site import project, serve
from smokebox.app.inbox import AppInbox
from smokebox.app.project import load_project
from smokebox.app.schedule import Scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.app.project import AppProject

NINE = """
schedule = "0 9 * * 1-5"
timezone = "Europe/Lisbon"
{missed}

async def run(ctx):
    return ctx.payload
"""
HOUR, DAY = 3600.0, 86400.0


def lisbon(day: int, hour: int, minute: int = 0) -> float:
    """A moment in March 2026, whose first day is a Sunday."""
    return datetime(2026, 3, day, hour, minute, tzinfo=ZoneInfo("Europe/Lisbon")).timestamp()


class Clock:
    """A clock set by the test."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest_asyncio.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[AppInbox]:
    inbox = AppInbox(str(tmp_path / "inbox.db"))
    yield inbox
    await inbox.aclose()


def load(tmp_path: Path, missed: str = "") -> AppProject:
    folder = project(tmp_path / "p", workflows__report=NINE.format(missed=missed))
    return load_project(folder)


async def times(inbox: AppInbox) -> list[str]:
    """Return the due times of the runs, latest first."""
    return [one.body["scheduled_at"] for one in await inbox.runs("report", limit=100)]


async def test_run_is_accepted_when_due_and_not_before(inbox: AppInbox, tmp_path: Path) -> None:
    found, clock = load(tmp_path), Clock(lisbon(2, 8))
    scheduler = Scheduler(inbox, lambda: found, clock=clock)
    for moment in (lisbon(2, 8), lisbon(2, 8, 59), lisbon(2, 9) - 0.5):
        clock.now = moment
        await scheduler.tick()
        assert await times(inbox) == []
    clock.now = lisbon(2, 9)
    for _ in range(3):
        await scheduler.tick()
    assert await times(inbox) == ["2026-03-02T09:00:00+00:00"]


async def test_schedule_follows_weekdays_and_time_zone(inbox: AppInbox, tmp_path: Path) -> None:
    """Over a weekend, and the night on which clocks in Portugal go forward."""
    found, clock = load(tmp_path), Clock(lisbon(26, 0))
    scheduler = Scheduler(inbox, lambda: found, clock=clock)
    while clock.now < lisbon(31, 12):
        await scheduler.tick()
        clock.now += HOUR / 2
    assert await times(inbox) == [
        "2026-03-31T08:00:00+00:00",
        "2026-03-30T08:00:00+00:00",
        "2026-03-27T09:00:00+00:00",
        "2026-03-26T09:00:00+00:00",
    ]


@pytest.mark.parametrize(
    ("missed", "runs"),
    [('missed = "once"', ["2026-03-02T09:00:00+00:00"]), ('missed = "skip"', [])],
)
async def test_missed_runs_are_run_once_or_skipped(
    inbox: AppInbox, tmp_path: Path, missed: str, runs: list[str]
) -> None:
    found, clock = load(tmp_path, missed), Clock(lisbon(2, 8))
    await Scheduler(inbox, lambda: found, clock=clock).tick()
    clock.now += 10 * DAY
    back = Scheduler(inbox, lambda: found, clock=clock)
    for _ in range(3):
        await back.tick()
    assert await times(inbox) == runs


async def test_two_processes_accept_one_run(inbox: AppInbox, tmp_path: Path) -> None:
    found, clock = load(tmp_path), Clock(lisbon(2, 8))
    other = AppInbox(inbox.path)
    schedulers = [Scheduler(one, lambda: found, clock=clock) for one in (inbox, other)]
    for day in range(2, 7):
        clock.now = lisbon(day, 8, 30)
        await asyncio.gather(*(one.tick() for one in schedulers))
        clock.now = lisbon(day, 9)
        await asyncio.gather(*(one.tick() for _ in range(5) for one in schedulers))
    assert len(await times(inbox)) == 5
    await other.aclose()


async def test_changed_schedule_starts_from_the_present(inbox: AppInbox, tmp_path: Path) -> None:
    clock = Clock(lisbon(2, 8))
    found = load(tmp_path)
    await Scheduler(inbox, lambda: found, clock=clock).tick()
    clock.now = lisbon(2, 12)
    text = NINE.format(missed="").replace("0 9", "0 18")
    changed = load_project(project(tmp_path / "p", workflows__report=text))
    scheduler = Scheduler(inbox, lambda: changed, clock=clock)
    await scheduler.tick()
    assert await times(inbox) == []
    clock.now = lisbon(2, 18)
    await scheduler.tick()
    assert await times(inbox) == ["2026-03-02T18:00:00+00:00"]


async def test_app_runs_due_workflows(tmp_path: Path) -> None:
    text = NINE.format(missed="").replace("0 9 * * 1-5", "* * * * *")
    folder = project(tmp_path / "p", workflows__report=text)
    inbox = AppInbox(str(folder / ".smokebox/inbox.db"))
    await inbox.due("report", "* * * * * (Europe/Lisbon)", 60.0)
    await inbox.aclose()
    async with serve(folder) as site:
        while not (runs := (await site.get("/workflows/report")).body["runs"]):
            await asyncio.sleep(0.01)
        done = await site.outcome(runs[-1]["submission_id"])
        assert done["result"] == {"scheduled_at": "1970-01-01T00:01:00+00:00"}
        listed = (await site.get("/workflows")).body["workflows"]
        assert listed[0]["schedule"] == "* * * * * (Europe/Lisbon)"
