"""Budgets: limits that end work with what there is."""

from __future__ import annotations

import pytest

from agents.working import at_work, of_kind
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


def spent(**usage: float) -> Turn:
    return Turn(["Working.", call("nothing")], usage=Usage(requests=1, **usage))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "requests"),
    [
        (Budget(turns=3), 3),
        (Budget(tokens=250), 3),
        (Budget(cost=0.5), 5),
    ],
)
async def test_work_that_reaches_a_limit_is_completed_with_what_there_is(
    budget: Budget, requests: int
) -> None:
    model = ScriptedModel(then=spent(input_tokens=90, output_tokens=10, cost=0.1))
    async with at_work(model=model, tools=[nothing], budget=budget) as session:
        reply = await session.prompt("go on")
        limit = next(name for name in ("turns", "tokens", "cost") if getattr(budget, name))
        assert (reply.text, reply.stopped) == ("Working.", f"budget: {limit}")
        assert len(model.requests) == requests
        (end,) = await of_kind(session, WorkEnded)
        assert (end.outcome, end.text) == ("completed", "Working.")


async def test_time_is_up_in_the_middle_of_an_answer() -> None:
    model = ScriptedModel(Turn("So far", hang=True), "next")
    async with at_work(model=model) as session:
        reply = await session.prompt("go", budget=Budget(seconds=0.1))
        assert (reply.text, reply.stopped) == ("So far", "budget: seconds")
        assert (await session.prompt("again")).text == "next"


async def test_time_is_up_in_the_middle_of_a_tool() -> None:
    import asyncio

    @tool
    async def forever() -> str:
        """Never ends."""
        await asyncio.Event().wait()
        return ""

    async with at_work(["Wait.", call("forever")], tools=[forever]) as session:
        reply = await session.prompt("go", budget=Budget(seconds=0.1))
        assert (reply.text, reply.stopped) == ("Wait.", "budget: seconds")
        assert [one.status for one in await of_kind(session, ToolEnded)] == ["aborted"]


async def test_a_budget_that_ends_before_the_result_gives_none() -> None:
    model = ScriptedModel(then=call("nothing"))
    async with at_work(model=model, tools=[nothing]) as session:
        with pytest.raises(ResultUnavailable, match="budget: turns"):
            await session.prompt("go", result=int, budget=Budget(turns=2))


async def test_each_prompt_has_the_budget_anew() -> None:
    async with at_work("one", "two", budget={"turns": 1}) as session:
        assert (await session.prompt("a")).stopped is None
        assert (await session.prompt("b")).stopped is None


def test_a_task_counts_against_its_parents_budget_too() -> None:
    parent = UsageMeter(Budget(tokens=100))
    child = UsageMeter(Budget(turns=5), parent)
    child.add(Usage(input_tokens=100), turns=1)
    assert parent.usage.input_tokens == 100
    assert child.exceeded() == "budget: tokens"


@pytest.mark.parametrize("turns", [0, -1, True, "many"])
def test_a_limit_that_is_none_is_refused(turns: object) -> None:
    with pytest.raises(InvalidOption, match="turns"):
        Budget(turns=turns)  # type: ignore[arg-type]
