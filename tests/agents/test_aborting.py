"""Calling off: whenever it comes, the work ends, whoever waits goes on, and so does the session."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from agents.working import at_work, first, model_of, of_kind, until
from smokebox import tool
from smokebox.agents import ToolContext  # noqa: TC001
from smokebox.agents.events import TextEvent
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.records import WorkEnded
from smokebox.errors import Aborted
from smokebox.testing import Turn, call, last_returns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.log.memory import MemoryWriter
    from smokebox.agents.log.records import Record
    from smokebox.agents.log.store import SessionKey
    from smokebox.agents.model import ModelRequest
    from smokebox.agents.operation import Operation
    from smokebox.agents.results import Reply


async def test_before_its_first_step() -> None:
    async with at_work("never said", "said") as session:
        operation = session.prompt("go")
        operation.abort("changed my mind")
        with pytest.raises(Aborted, match="changed my mind"):
            await operation
        assert session.running is None
        assert (await session.prompt("again")).text == "never said"


async def test_who_iterates_over_what_was_called_off_comes_to_an_end() -> None:
    async with at_work("never said") as session:
        operation = session.prompt("go")
        operation.abort()
        assert [event async for event in operation] == []


async def test_cancelling_who_waits_calls_it_off() -> None:
    async with at_work(Turn("half", hang=True), "said") as session:
        operation = session.prompt("go")
        waiting = asyncio.ensure_future(_wait_for(operation))
        await first(operation, TextEvent)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert [end.outcome for end in await of_kind(session, WorkEnded)] == ["aborted"]
        assert (await session.prompt("again")).text == "said"


async def test_cancelling_who_waits_before_the_first_step_ends_too() -> None:
    async with at_work("said") as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await session.prompt("go")
        assert (await session.prompt("again")).text == "said"


async def _wait_for(operation: Operation[Reply[Any]]) -> Reply[Any]:
    return await operation


class SlowEnd(MemoryStore):
    """A store that is slow to keep the end of work."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> MemoryWriter:
        writer = await super().open(key, wait=wait)
        keep = writer.append

        async def append(records: Sequence[Record]) -> int:
            if any(isinstance(record, WorkEnded) for record in records):
                self.reached.set()
                await self.go.wait()
            return await keep(records)

        writer.append = append  # type: ignore[method-assign]
        return writer


async def test_while_its_end_is_recorded_it_has_ended() -> None:
    store = SlowEnd()
    async with at_work("one", "two", persist=store) as session:
        operation = session.prompt("go")
        await store.reached.wait()
        operation.abort()
        store.go.set()
        assert (await operation).text == "one"
        await until(lambda: session.running is None)
        assert (await session.prompt("again")).text == "two"
        assert [end.outcome for end in await of_kind(session, WorkEnded)] == ["completed"] * 2


async def test_calls_that_a_server_numbers_anew_in_each_answer_are_told_apart() -> None:
    keys: list[str] = []

    @tool(durable=True)
    async def pay(ctx: ToolContext) -> str:
        """Pay."""
        keys.append(ctx.key)
        return "paid"

    def answer(request: ModelRequest) -> object:
        return "done" if len(keys) == 3 else call("pay", call_id="call_0")

    async with at_work(answer, answer, answer, answer, tools=[pay]) as session:
        assert (await session.prompt("pay thrice")).text == "done"
        assert len(set(keys)) == 3
        assert last_returns(model_of(session.harness).requests[-1])
