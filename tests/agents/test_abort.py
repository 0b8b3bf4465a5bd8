"""Tests of aborting work at any time; the session stays usable."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from agents.scripted_session import (
    first_event,
    records_of,
    scripted_model,
    scripted_session,
    wait_until,
)
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


async def test_abort_before_the_first_step() -> None:
    async with scripted_session("never sent", "sent") as session:
        operation = session.prompt("go")
        operation.abort("changed my mind")
        with pytest.raises(Aborted, match="changed my mind"):
            await operation
        assert session.running is None
        assert (await session.prompt("again")).text == "never sent"


async def test_iteration_over_aborted_operation_ends() -> None:
    async with scripted_session("never sent") as session:
        operation = session.prompt("go")
        operation.abort()
        assert [event async for event in operation] == []


async def test_cancelling_the_awaiting_task_aborts_the_work() -> None:
    async with scripted_session(Turn("half", hang=True), "sent") as session:
        operation = session.prompt("go")
        waiting = asyncio.ensure_future(_wait_for(operation))
        await first_event(operation, TextEvent)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["aborted"]
        assert (await session.prompt("again")).text == "sent"


async def test_timeout_before_the_first_step_aborts_the_work() -> None:
    async with scripted_session("sent") as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await session.prompt("go")
        assert (await session.prompt("again")).text == "sent"


async def _wait_for(operation: Operation[Reply[Any]]) -> Reply[Any]:
    return await operation


class SlowEndStore(MemoryStore):
    """A store that blocks before it appends the end of work."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self.proceed = asyncio.Event()

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> MemoryWriter:
        writer = await super().open(key, wait=wait)
        original = writer.append

        async def append(records: Sequence[Record]) -> int:
            if any(isinstance(record, WorkEnded) for record in records):
                self.reached.set()
                await self.proceed.wait()
            return await original(records)

        writer.append = append  # type: ignore[method-assign]
        return writer


async def test_abort_while_the_outcome_is_recorded_has_no_effect() -> None:
    store = SlowEndStore()
    async with scripted_session("one", "two", persist=store) as session:
        operation = session.prompt("go")
        await store.reached.wait()
        operation.abort()
        store.proceed.set()
        assert (await operation).text == "one"
        await wait_until(lambda: session.running is None)
        assert (await session.prompt("again")).text == "two"
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["completed"] * 2


async def test_repeated_call_ids_become_unique() -> None:
    keys: list[str] = []

    @tool(durable=True)
    async def pay(ctx: ToolContext) -> str:
        """Pay."""
        keys.append(ctx.key)
        return "paid"

    def answer(request: ModelRequest) -> object:
        return "done" if len(keys) == 3 else call("pay", call_id="call_0")

    async with scripted_session(answer, answer, answer, answer, tools=[pay]) as session:
        assert (await session.prompt("pay thrice")).text == "done"
        assert len(set(keys)) == 3
        assert last_returns(scripted_model(session.harness).requests[-1])
