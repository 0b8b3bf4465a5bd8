"""Tests of budgets: work that reaches a limit ends with the text it has."""

from __future__ import annotations

import pytest

from agents.scripted_session import records_of, scripted_session
from smokebox import Budget, tool
from smokebox.agents.limits import UsageMeter
from smokebox.agents.log.records import ToolEnded, WorkEnded
from smokebox.agents.messages import Usage
from smokebox.errors import InvalidOption, ResultUnavailable
from smokebox.testing import ScriptedModel, Turn, call


@tool
def nothing() -> str:
    """Do nothing."""
    return "nothing"


def turn_with_usage(**usage: float) -> Turn:
    return Turn(["Working.", call("nothing")], usage=Usage(requests=1, **usage))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "requests"),
    [
        (Budget(turns=3), 3),
        (Budget(tokens=250), 3),
        (Budget(cost=0.5), 5),
    ],
)
async def test_work_that_reaches_a_limit_completes_with_its_text(
    budget: Budget, requests: int
) -> None:
    model = ScriptedModel(then=turn_with_usage(input_tokens=90, output_tokens=10, cost=0.1))
    async with scripted_session(model=model, tools=[nothing], budget=budget) as session:
        reply = await session.prompt("go on")
        limit = next(name for name in ("turns", "tokens", "cost") if getattr(budget, name))
        assert (reply.text, reply.stopped) == ("Working.", f"budget: {limit}")
        assert len(model.requests) == requests
        (end,) = await records_of(session, WorkEnded)
        assert (end.outcome, end.text) == ("completed", "Working.")


async def test_time_limit_interrupts_a_reply() -> None:
    model = ScriptedModel(Turn("So far", hang=True), "next")
    async with scripted_session(model=model) as session:
        reply = await session.prompt("go", budget=Budget(seconds=0.1))
        assert (reply.text, reply.stopped) == ("So far", "budget: seconds")
        assert (await session.prompt("again")).text == "next"


async def test_time_limit_interrupts_a_tool() -> None:
    import asyncio

    @tool
    async def forever() -> str:
        """Never ends."""
        await asyncio.Event().wait()
        return ""

    async with scripted_session(["Wait.", call("forever")], tools=[forever]) as session:
        reply = await session.prompt("go", budget=Budget(seconds=0.1))
        assert (reply.text, reply.stopped) == ("Wait.", "budget: seconds")
        assert [one.status for one in await records_of(session, ToolEnded)] == ["aborted"]


async def test_budget_exceeded_before_the_result_raises() -> None:
    model = ScriptedModel(then=call("nothing"))
    async with scripted_session(model=model, tools=[nothing]) as session:
        with pytest.raises(ResultUnavailable, match="budget: turns"):
            await session.prompt("go", result=int, budget=Budget(turns=2))


async def test_budget_of_a_prompt_can_be_a_dict() -> None:
    model = ScriptedModel(then=call("nothing"))
    async with scripted_session(model=model, tools=[nothing]) as session:
        assert (await session.prompt("go", budget={"turns": 2})).stopped == "budget: turns"
        with pytest.raises(InvalidOption, match="budget must be a Budget or a dict"):
            session.prompt("go", budget=5)  # type: ignore[call-overload]


async def test_each_prompt_has_the_whole_budget() -> None:
    async with scripted_session("one", "two", budget={"turns": 1}) as session:
        assert (await session.prompt("a")).stopped is None
        assert (await session.prompt("b")).stopped is None


def test_task_counts_against_the_budget_of_its_parent() -> None:
    parent = UsageMeter(Budget(tokens=100))
    child = UsageMeter(Budget(turns=5), parent)
    child.add(Usage(input_tokens=100), turns=1)
    assert parent.usage.input_tokens == 100
    assert child.exceeded() == "budget: tokens"


@pytest.mark.parametrize("turns", [0, -1, True, "many"])
def test_invalid_limit_is_refused(turns: object) -> None:
    with pytest.raises(InvalidOption, match="turns"):
        Budget(turns=turns)  # type: ignore[arg-type]
