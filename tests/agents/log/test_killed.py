"""kill -9 of a process that writes: what it was told is durable is there, whole."""

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
PATIENCE = 60.0

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where sessions are, as `persist` has it."""
    if request.param == "postgres":
        found: str = request.getfixturevalue("database")
        return found
    return str(tmp_path / "agents.db")


@contextlib.asynccontextmanager
async def appender(place: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that writes, killed at the end."""
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


async def heard(process: asyncio.subprocess.Process) -> str:
    """The next line."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        return (await process.stdout.readline()).decode().strip()


async def everything(store: SessionStore) -> list[StoredRecord]:
    found: list[StoredRecord] = []
    while page := await store.read(KEY, after=len(found)):
        found += page
    return found


def check_whole(found: list[StoredRecord], acknowledged: int) -> None:
    """Everything that was acknowledged is there; what was not is there whole, or not at all."""
    assert len(found) >= acknowledged
    assert len(found) % 3 == 0
    for number, stored in enumerate(found):
        assert stored.offset == number + 1
        assert isinstance(stored.record, MessageAdded)
        [part] = stored.record.message.parts
        assert isinstance(part, Text) and part.text.startswith(f"{number // 3}.{number % 3}")


async def test_what_was_acknowledged_is_there_after_every_kill(place: str) -> None:
    dice = random.Random(place)
    store = open_store(place)
    acknowledged = 0
    for _ in range(4):
        async with appender(place) as process:
            for _ in range(dice.randint(1, 40)):
                acknowledged = int(await heard(process))
            process.kill()
            while line := await heard(process):
                acknowledged = int(line)
        check_whole(await everything(store), acknowledged)
        # The dead have no rights: nobody has to wait for a lease.
        writer = await store.open(KEY, wait=10)
        await writer.release()
    await store.aclose()


async def test_of_processes_that_race_one_writes(place: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        racers = [await stack.enter_async_context(appender(place)) for _ in range(4)]
        said = [await heard(one) for one in racers]
        assert said.count("busy") == 3
        winner = next(one for one, line in zip(racers, said, strict=True) if line != "busy")
        acknowledged = int(await heard(winner))
    store = open_store(place)
    check_whole(await everything(store), acknowledged)
    await store.aclose()


async def test_another_process_follows_as_it_is_written(place: str) -> None:
    store = open_store(place)
    found: list[StoredRecord] = []
    async with (
        appender(place),
        asyncio.timeout(PATIENCE),
        contextlib.aclosing(store.follow(KEY)) as records,
    ):
        async for stored in records:
            found.append(stored)
            if len(found) == 30:
                break
    check_whole(found, 30)
    await store.aclose()
