"""Tests of a session of 500 turns: request size, memory, and reading it."""

from __future__ import annotations

import gc
import json
import subprocess
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from cli.terminal import SMOKEBOX
from smokebox import create_agent, init
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.messages import AssistantMessage, Text, Usage
from smokebox.agents.model import CallDelta, ModelInfo, ModelRequest, TextDelta
from smokebox.testing import call

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from smokebox.agents.model import Delta

TURNS = 500
LINES = "a line of what there is to see\n" * 20
pytestmark = pytest.mark.timeout(180)


class CountingModel:
    """A model that calls a tool for a number of turns, and counts the new messages of each.

    It keeps no messages, so that measured memory is that of the session.
    """

    name = "counting/model"
    info = ModelInfo(context_window=8000, max_output=400)

    def __init__(self, turns: int) -> None:
        self.left = turns
        self.requests = 0
        self.new: list[int] = []
        self.before = 0
        self.first: object = None
        self.summaries = 0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        if "summarize" in request.system:
            self.summaries += 1
            parts: tuple[Any, ...] = (Text("What was seen: lines."),)
            yield TextDelta("What was seen: lines.")
        else:
            # Messages that the cache of a provider does not have: all, if the start has changed.
            same = request.messages[0] is self.first and len(request.messages) >= self.before
            self.new.append(len(request.messages) - (self.before if same else 0))
            self.first, self.before = request.messages[0], len(request.messages)
            self.requests += 1
            self.left -= 1
            parts = (call("look", call_id=f"c{self.requests}"),) if self.left else (Text("Seen."),)
            yield CallDelta("look") if self.left else TextDelta("Seen.")
        usage = Usage(requests=1)
        yield AssistantMessage(parts=parts, model=self.name, stop="end", usage=usage)

    async def aclose(self) -> None:
        return


def look() -> str:
    """Return some lines."""
    return LINES


async def work(store: str, turns: int, **options: Any) -> CountingModel:
    model = CountingModel(turns)
    agent = create_agent(
        name="looker", model=model, sandbox=None, tools=[look], persist=store, **options
    )
    async with init(agent, id="long") as harness:
        reply = await (await harness.session()).prompt("Look, again and again.")
        assert (reply.text, reply.usage.requests) == ("Seen.", turns + model.summaries)
    return model


async def test_each_turn_adds_two_messages(tmp_path: Path) -> None:
    model = await work(str(tmp_path / "agents.db"), TURNS, compaction=False)
    assert model.requests == TURNS
    # The last reply and its tool result: the rest is unchanged.
    assert model.new == [1] + [2] * (TURNS - 1)


async def test_records_of_a_turn_do_not_grow(tmp_path: Path) -> None:
    sizes = []
    for turns in (TURNS // 5, TURNS):
        file = tmp_path / f"{turns}.db"
        await work(str(file), turns, compaction=False)
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob(f"{turns}.db*")))
    assert sizes[1] < 5.5 * sizes[0]


async def test_memory_is_constant_with_compaction(tmp_path: Path) -> None:
    model = CountingModel(0)
    agent = create_agent(
        model=model,
        sandbox=None,
        tools=[look],
        persist=str(tmp_path / "agents.db"),
        compaction={"keep_recent": 1000},
    )
    peaks = []
    async with init(agent) as harness:
        session = await harness.session()
        for number in range(6):
            gc.collect()
            tracemalloc.reset_peak() if number else tracemalloc.start()
            model.left = TURNS // 5
            await session.prompt("Look, again and again.")
            peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert model.requests > TURNS
    assert model.summaries > 5
    # The first round includes one-time imports.
    assert peaks[5] < 1.25 * peaks[1]


async def test_long_session_can_be_shown_and_exported(tmp_path: Path) -> None:
    file = str(tmp_path / "agents.db")
    await work(file, TURNS)
    store = SqliteStore(file)
    (summary,) = await store.sessions()
    await store.aclose()
    shown = sessions("show", file)
    assert shown.startswith("started ")
    assert "> Look, again and again.\n" in shown
    assert shown.count("a line of what there is to see") >= TURNS - 1
    assert "Seen." in shown
    assert len([json.loads(line) for line in sessions("export", file).splitlines()]) == summary.head


def sessions(verb: str, store: str) -> str:
    command = [SMOKEBOX, "sessions", verb, "looker/long", "--store", store]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
