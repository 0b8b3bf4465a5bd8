"""Tasks: child sessions of code and of models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from agents.working import at_work, event_log, first, of_kind, until
from smokebox import Budget, create_agent, tool, virtual
from smokebox.agents.events import TaskEnd, TaskEvent, TaskStart, TextEvent
from smokebox.agents.log.records import TaskEnded, TaskStarted, WorkEnded
from smokebox.agents.messages import Usage
from smokebox.errors import Aborted, LimitReached, NotFound
from smokebox.testing import ScriptedModel, Turn, call, last_returns, last_text

if TYPE_CHECKING:
    from smokebox.agents.model import ModelRequest


async def test_code_gives_a_task_that_the_conversation_does_not_see() -> None:
    model = ScriptedModel("from the child", "from the parent")
    async with at_work(model=model, sandbox=virtual) as session:
        reply = await session.task("Look around")
        assert reply.text == "from the child"
        await session.prompt("hello")
        assert len(model.requests[1].messages) == 1
        (started,) = await of_kind(session, TaskStarted)
        assert started.session.startswith("task:default:")
        listed = await session.harness.sessions.list(tasks=True)
        assert {one.parent for one in listed} == {None, "default"}
        assert len(await session.harness.sessions.list()) == 1


async def test_a_model_gives_tasks_that_are_worked_on_side_by_side() -> None:
    meeting = asyncio.Barrier(2)

    async def child(request: ModelRequest) -> str:
        await asyncio.wait_for(meeting.wait(), 10)
        return f"did {last_text(request)}"

    model = ScriptedModel(
        [call("task", prompt="one"), call("task", prompt="two")], child, child, "ok"
    )
    async with at_work(model=model, sandbox=virtual) as session:
        operation = session.prompt("go")
        events = [event async for event in operation]
        reply = await operation
        assert [back.text for back in last_returns(model.requests[3])] == ["did one", "did two"]
        assert reply.usage.requests == 4
        ended = await of_kind(session, TaskEnded)
        assert [(one.outcome, one.usage.requests) for one in ended] == [("completed", 1)] * 2
    assert sum(isinstance(event, TaskStart) for event in events) == 2
    assert sum(isinstance(event, TaskEnd) for event in events) == 2
    assert any(isinstance(event, TaskEvent) for event in events)


async def test_a_child_works_in_the_sandbox_of_its_parent() -> None:
    model = ScriptedModel(call("bash", command="pwd; cat a.txt"), "ok")
    async with at_work(model=model, sandbox=virtual) as session:
        await session.harness.fs.write_file("a.txt", "shared")
        await session.harness.fs.mkdir("sub")
        await session.harness.fs.write_file("sub/a.txt", "deeper")
        await session.task("look", cwd="sub")
    assert last_returns(model.requests[1])[0].text == "/workspace/sub\ndeeper"


async def test_a_subagent_has_its_own_instructions_model_and_tools() -> None:
    @tool
    def count() -> int:
        """Count."""
        return 3

    theirs = ScriptedModel(call("count"), "three", name="other/model")
    counter = create_agent(
        name="counter", description="Counts.", model=theirs, instructions="Count.", tools=[count]
    )
    model = ScriptedModel(call("task", prompt="how many?", agent="counter"), "3")
    async with at_work(model=model, sandbox=virtual, subagents=[counter]) as session:
        assert (await session.prompt("go")).text == "3"
        assert "counter: Counts." in next(
            spec.description for spec in model.requests[0].tools if spec.name == "task"
        )
        assert last_returns(model.requests[1])[0].text == "three"
        with pytest.raises(NotFound, match="Did you mean 'counter'"):
            session.task("x", agent="countr")
    assert theirs.requests[0].system.startswith("Count.")
    assert "count" in [spec.name for spec in theirs.requests[0].tools]


async def test_a_subagent_may_have_a_sandbox_of_its_own_which_ends_with_it() -> None:
    made: list[Any] = []

    def own() -> Any:
        made.append(virtual(files={"/workspace/own": "mine"}))
        return made[0]

    theirs = ScriptedModel(call("bash", command="cat own"), "ok")
    other = create_agent(name="other", model=theirs, sandbox=own)
    async with at_work(sandbox=virtual, subagents=[other]) as session:
        await session.task("look", agent="other")
    assert last_returns(theirs.requests[1])[0].text == "mine"
    with pytest.raises(Exception, match="closed"):
        await made[0].exec("ls")


async def test_an_unknown_subagent_is_told_to_the_model() -> None:
    model = ScriptedModel(call("task", prompt="x", agent="nobody"), "ok")
    other = create_agent(name="other")
    async with at_work(model=model, sandbox=virtual, subagents=[other]) as session:
        await session.prompt("go")
    assert "no subagent 'nobody'" in last_returns(model.requests[1])[0].text


async def test_tasks_of_tasks_end_at_four() -> None:
    def deeper(request: ModelRequest) -> Any:
        if any(spec.name == "task" for spec in request.tools):
            return (
                last_returns(request)[0].text
                if last_returns(request)
                else call("task", prompt="deeper")
            )
        return "the bottom"

    model = ScriptedModel(then=deeper)
    async with at_work(model=model, sandbox=virtual) as session:
        assert (await session.prompt("go")).text == "the bottom"
        listed = await session.harness.sessions.list(tasks=True)
        assert len(listed) == 5


async def test_code_cannot_go_deeper_than_four_either() -> None:
    async with at_work(sandbox=virtual) as session:
        created = event_log(session).conversation.created
        assert created is not None
        event_log(session).conversation.created = type(created)("", depth=4)
        with pytest.raises(LimitReached, match="5 deep"):
            await session.task("deeper")


async def test_an_abort_reaches_the_children() -> None:
    model = ScriptedModel(call("task", prompt="x"), Turn("working", hang=True))
    async with at_work(model=model, sandbox=virtual) as session:
        operation = session.prompt("go")
        async for event in operation:
            if isinstance(event, TaskEvent) and isinstance(event.event, TextEvent):
                break
        child = await session.harness.session(event.session)  # type: ignore[union-attr]
        await operation.abort()
        with pytest.raises(Aborted):
            await operation
        assert [end.outcome for end in await of_kind(child, WorkEnded)] == ["aborted"]
        assert [end.outcome for end in await of_kind(session, WorkEnded)] == ["aborted"]
        assert [end.outcome for end in await of_kind(session, TaskEnded)] == ["aborted"]


async def test_a_task_that_fails_is_told_to_the_model() -> None:
    from smokebox.errors import ModelRefused

    model = ScriptedModel(
        call("task", prompt="x"), ModelRefused("no", model="m"), "it did not work"
    )
    async with at_work(model=model, sandbox=virtual) as session:
        assert (await session.prompt("go")).text == "it did not work"
    assert "The task failed" in last_returns(model.requests[2])[0].text


async def test_a_task_counts_against_the_budget_of_who_gave_it() -> None:
    busy = Turn("x", usage=Usage(requests=1, input_tokens=1000))
    model = ScriptedModel(call("task", prompt="x"), busy)
    async with at_work(model=model, sandbox=virtual) as session:
        reply = await session.prompt("go", budget=Budget(tokens=1000))
        assert reply.stopped == "budget: tokens"
        assert len(model.requests) == 2


async def test_a_task_may_have_a_result() -> None:
    async with at_work(call("finish", result=[1, 2]), sandbox=virtual) as session:
        reply = await session.task("numbers", result=list[int])
        assert reply.data == [1, 2]


async def test_none_for_subagents_takes_the_tool_away() -> None:
    model = ScriptedModel("ok")
    async with at_work(model=model, sandbox=virtual, subagents=None) as session:
        await session.prompt("go")
    assert "task" not in [spec.name for spec in model.requests[0].tools]


async def test_a_subagent_without_a_policy_of_its_own_has_that_of_its_parent() -> None:
    theirs = ScriptedModel(call("bash", command="rm -rf /"), "denied?")
    other = create_agent(name="other", model=theirs)
    model = ScriptedModel(call("task", prompt="x", agent="other"), "ok")
    async with at_work(
        model=model, sandbox=virtual, subagents=[other], approval={"deny": ["bash"]}
    ) as session:
        await session.prompt("go")
    assert last_returns(theirs.requests[1])[0].is_error


async def test_deleting_a_session_deletes_its_tasks() -> None:
    async with at_work("x", sandbox=virtual) as session:
        await session.task("x")
        await session.delete()
        assert await session.harness.sessions.list(tasks=True) == []


async def test_events_of_a_child_come_through_its_parent() -> None:
    async with at_work(call("task", prompt="x"), "child says", "ok", sandbox=virtual) as session:
        operation = session.prompt("go")
        event = await first(operation, TaskEvent)
        assert event.session.startswith("task:")
        await operation
        await until(lambda: session.running is None)
