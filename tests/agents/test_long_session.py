"""A session of 500 turns: each sends what is new, memory is flat, and all of it can be read."""

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
SEEN = "a line of what there is to see\n" * 20
pytestmark = pytest.mark.timeout(180)


class Counting:
    """A model that calls a tool until it was asked often enough, and counts what is new to it.

    It keeps nothing of what it was sent, so that memory is the session's own.
    """

    name = "counting/model"
    info = ModelInfo(context_window=8000, max_output=400)

    def __init__(self, turns: int) -> None:
        self.left = turns
        self.asked = 0
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
            # What a cache of the provider does not have: all, where the beginning is another.
            same = request.messages[0] is self.first and len(request.messages) >= self.before
            self.new.append(len(request.messages) - (self.before if same else 0))
            self.first, self.before = request.messages[0], len(request.messages)
            self.asked += 1
            self.left -= 1
            parts = (call("look", call_id=f"c{self.asked}"),) if self.left else (Text("Seen."),)
            yield CallDelta("look") if self.left else TextDelta("Seen.")
        usage = Usage(requests=1)
        yield AssistantMessage(parts=parts, model=self.name, stop="end", usage=usage)

    async def aclose(self) -> None:
        return


def look() -> str:
    """Look."""
    return SEEN


async def work(store: str, turns: int, **options: Any) -> Counting:
    model = Counting(turns)
    agent = create_agent(
        name="looker", model=model, sandbox=None, tools=[look], persist=store, **options
    )
    async with init(agent, id="long") as harness:
        reply = await (await harness.session()).prompt("Look, again and again.")
        assert (reply.text, reply.usage.requests) == ("Seen.", turns + model.summaries)
    return model


async def test_each_turn_sends_what_is_new_and_no_more(tmp_path: Path) -> None:
    model = await work(str(tmp_path / "agents.db"), TURNS, compaction=False)
    assert model.asked == TURNS
    # The answer before and what its tool came to: the rest was sent by the turn before, as it is.
    assert model.new == [1] + [2] * (TURNS - 1)


async def test_what_is_recorded_of_a_turn_does_not_grow(tmp_path: Path) -> None:
    sizes = []
    for turns in (TURNS // 5, TURNS):
        file = tmp_path / f"{turns}.db"
        await work(str(file), turns, compaction=False)
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob(f"{turns}.db*")))
    assert sizes[1] < 5.5 * sizes[0]


async def test_memory_stays_where_it_is_once_the_conversation_is_compacted(tmp_path: Path) -> None:
    model = Counting(0)
    agent = create_agent(
        model=model,
        sandbox=None,
        tools=[look],
        persist=str(tmp_path / "agents.db"),
        compaction={"keep_recent": 1000},
    )
    held = []
    async with init(agent) as harness:
        session = await harness.session()
        for number in range(6):
            gc.collect()
            tracemalloc.reset_peak() if number else tracemalloc.start()
            model.left = TURNS // 5
            await session.prompt("Look, again and again.")
            held.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert model.asked > TURNS
    assert model.summaries > 5
    # The first pays for what is loaded once. Of five hundred turns later ones hold no more.
    assert held[5] < 1.25 * held[1]


async def test_five_hundred_turns_can_be_read(tmp_path: Path) -> None:
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
