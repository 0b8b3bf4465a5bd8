"""SIGKILL of an agent during a response, a tool call, a compaction or a subagent's task.

Afterwards each work item has one outcome, no effect happened twice, and the model gets a
conversation that a provider accepts. SMOKEBOX_CRASH_ROUNDS is the number of kills.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agents.log.random_session import sendable
from smokebox.agents.log.conversation import Conversation
from smokebox.agents.log.records import ToolEnded, ToolStarted, WorkAccepted, WorkEnded
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.log.store import SessionKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents.log.records import Record

WORKLOAD = Path(__file__).with_name("agent_workload.py")
TESTS = Path(__file__).parents[1]
# The most important ones first: a quick run has only these.
PHASES = ("stream", "tool", "compaction", "child", "durable", "ready", "done")
ROUNDS = int(os.environ.get("SMOKEBOX_CRASH_ROUNDS", "5"))
STEPS_EACH = 6
# Longer means that the agent hangs.
HANG_SECONDS = 90.0

pytestmark = pytest.mark.timeout(120 + 20 * ROUNDS)


@contextlib.asynccontextmanager
async def agent(home: Path, prompts: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an agent in a child process, and kill it after the block."""
    errors = os.open(home / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKLOAD),
        str(home),
        str(prompts),
        env={"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
    )
    os.close(errors)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read_line(process: asyncio.subprocess.Process) -> str:
    """Return the next line of its output, empty at the end."""
    assert process.stdout is not None
    async with asyncio.timeout(HANG_SECONDS):
        return (await process.stdout.readline()).decode().strip()


async def kill_at(home: Path, phase: str, count: int) -> None:
    """Kill an agent when it reports a phase for the `count`th time."""
    async with agent(home, 1_000_000) as process:
        while count:
            line = await read_line(process)
            assert line, (home / "errors").read_text()
            count -= line.split()[0] == phase
        process.kill()


async def read_records(store: SqliteStore, key: SessionKey) -> list[Record]:
    found: list[Record] = []
    while page := await store.read(key, after=len(found)):
        found += [stored.record for stored in page]
    return found


def outcomes(records: list[Record]) -> collections.Counter[str]:
    return collections.Counter(one.work_id for one in records if isinstance(one, WorkEnded))


async def check(home: Path, *, finished: bool) -> None:
    """Check the event log and the effects, whenever the agent was killed."""
    store = SqliteStore(f"{home}/agents.db")
    for one in await store.sessions():
        records = await read_records(store, one.key)
        accepted = {record.work_id for record in records if isinstance(record, WorkAccepted)}
        ended = outcomes(records)
        assert set(ended.values()) <= {1}
        assert ended.keys() <= accepted
        conversation = await Conversation.load(store, one.key)
        assert sendable(conversation.messages)
        check_tools(records)
        if finished:
            assert ended.keys() == accepted
            assert conversation.pending_calls == []
    await store.aclose()
    check_effects((home / "effects").read_text() if (home / "effects").exists() else "")


def check_tools(records: list[Record]) -> None:
    """Each tool starts once, except durable ones and resumed tasks; each ends once."""
    starts = [
        one
        for one in records
        if isinstance(one, ToolStarted) and not one.durable and one.name != "task"
    ]
    assert len({one.call_id for one in starts}) == len(starts)
    ends = [one.call_id for one in records if isinstance(one, ToolEnded)]
    assert len(set(ends)) == len(ends)


def check_effects(text: str) -> None:
    """No effect happened twice; durable ones have the same key each time."""
    lines = text.splitlines()
    once = [line for line in lines if not line.startswith("durable ")]
    assert len(set(once)) == len(once)
    keys: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith("durable "):
            _, key, step = line.split()
            keys.setdefault(step, set()).add(key)
    assert all(len(found) == 1 for found in keys.values())


async def test_killed_agent_resumes_its_work(tmp_path: Path) -> None:
    rng = random.Random(os.environ.get("SMOKEBOX_CRASH_SEED", "1"))
    phases = [PHASES[number % len(PHASES)] for number in range(ROUNDS)]
    rng.shuffle(phases)
    for phase in phases:
        await kill_at(tmp_path, phase, 1 if phase == "ready" else rng.randint(1, 4))
        await check(tmp_path, finished=False)
    store = SqliteStore(f"{tmp_path}/agents.db")
    key = SessionKey("crash", "one", "default")
    accepted = [one for one in await read_records(store, key) if isinstance(one, WorkAccepted)]
    await store.aclose()
    last = len(accepted) + 1
    async with agent(tmp_path, last) as process:
        lines = []
        while line := await read_line(process):
            lines.append(line)
        assert await process.wait() == 0, (tmp_path / "errors").read_text()
    assert lines[-1] == f"done {last} I have reached goal-{last * STEPS_EACH}."
    await check(tmp_path, finished=True)
