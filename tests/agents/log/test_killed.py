"""Tests of kill -9 on a writing process: acknowledged appends are durable and atomic."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.log.persistence import open_store
from smokebox.agents.log.records import MessageAdded
from smokebox.agents.log.store import SessionKey
from smokebox.agents.messages import Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents.log.records import StoredRecord
    from smokebox.agents.log.store import SessionStore

APPENDER = Path(__file__).with_name("appender.py")
SOURCE = Path(__file__).parents[3] / "src"
KEY = SessionKey("agent", "one", "killed")
TIMEOUT = 60.0

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The store, as a value of `persist`."""
    if request.param == "postgres":
        found: str = request.getfixturevalue("database")
        return found
    return str(tmp_path / "agents.db")


@contextlib.asynccontextmanager
async def appender(place: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process that appends, and kill it at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(APPENDER),
        place,
        KEY.session,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read_line(process: asyncio.subprocess.Process) -> str:
    """Return the next line that the process printed."""
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT):
        return (await process.stdout.readline()).decode().strip()


async def all_records(store: SessionStore) -> list[StoredRecord]:
    found: list[StoredRecord] = []
    while page := await store.read(KEY, after=len(found)):
        found += page
    return found


def check_whole(found: list[StoredRecord], acknowledged: int) -> None:
    """Check that acknowledged appends are complete, and later ones complete or missing."""
    assert len(found) >= acknowledged
    assert len(found) % 3 == 0
    for number, stored in enumerate(found):
        assert stored.offset == number + 1
        assert isinstance(stored.record, MessageAdded)
        [part] = stored.record.message.parts
        assert isinstance(part, Text) and part.text.startswith(f"{number // 3}.{number % 3}")


async def test_acknowledged_appends_survive_a_kill(place: str) -> None:
    rng = random.Random(place)
    store = open_store(place)
    acknowledged = 0
    for _ in range(4):
        async with appender(place) as process:
            for _ in range(rng.randint(1, 40)):
                acknowledged = int(await read_line(process))
            process.kill()
            while line := await read_line(process):
                acknowledged = int(line)
        check_whole(await all_records(store), acknowledged)
        # The lock ends with the process: no lease has to expire.
        writer = await store.open(KEY, wait=10)
        await writer.release()
    await store.aclose()


async def test_one_of_several_processes_becomes_the_writer(place: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        racers = [await stack.enter_async_context(appender(place)) for _ in range(4)]
        lines = [await read_line(one) for one in racers]
        assert lines.count("busy") == 3
        winner = next(one for one, line in zip(racers, lines, strict=True) if line != "busy")
        acknowledged = int(await read_line(winner))
    store = open_store(place)
    check_whole(await all_records(store), acknowledged)
    await store.aclose()


async def test_another_process_follows_new_records(place: str) -> None:
    store = open_store(place)
    found: list[StoredRecord] = []
    async with (
        appender(place),
        asyncio.timeout(TIMEOUT),
        contextlib.aclosing(store.follow(KEY)) as records,
    ):
        async for stored in records:
            found.append(stored)
            if len(found) == 30:
                break
    check_whole(found, 30)
    await store.aclose()
