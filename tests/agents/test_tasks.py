"""Tests of tasks, which child sessions do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from agents.scripted_session import event_log, first_event, records_of, scripted_session, wait_until
from smokebox import Budget, create_agent, tool, virtual
from smokebox.agents.events import TaskEnd, TaskEvent, TaskStart, TextEvent
from smokebox.agents.log.records import TaskEnded, TaskStarted, WorkEnded
from smokebox.agents.messages import Usage
from smokebox.errors import Aborted, LimitReached, NotFound
from smokebox.testing import ScriptedModel, Turn, call, last_returns, last_text

if TYPE_CHECKING:
    from smokebox.agents.model import ModelRequest


async def test_session_task_is_not_in_the_conversation() -> None:
    model = ScriptedModel("from the child", "from the parent")
    async with scripted_session(model=model, sandbox=virtual) as session:
        reply = await session.task("Look around")
        assert reply.text == "from the child"
        await session.prompt("hello")
        assert len(model.requests[1].messages) == 1
        (started,) = await records_of(session, TaskStarted)
        assert started.session.startswith("task:default:")
        listed = await session.harness.sessions.list(tasks=True)
        assert {one.parent for one in listed} == {None, "default"}
        assert len(await session.harness.sessions.list()) == 1


async def test_tasks_of_a_model_run_concurrently() -> None:
    meeting = asyncio.Barrier(2)

    async def child(request: ModelRequest) -> str:
        await asyncio.wait_for(meeting.wait(), 10)
        return f"did {last_text(request)}"

    model = ScriptedModel(
        [call("task", prompt="one"), call("task", prompt="two")], child, child, "ok"
    )
    async with scripted_session(model=model, sandbox=virtual) as session:
        operation = session.prompt("go")
        events = [event async for event in operation]
        reply = await operation
        assert [back.text for back in last_returns(model.requests[3])] == ["did one", "did two"]
        assert reply.usage.requests == 4
        ended = await records_of(session, TaskEnded)
        assert [(one.outcome, one.usage.requests) for one in ended] == [("completed", 1)] * 2
    assert sum(isinstance(event, TaskStart) for event in events) == 2
    assert sum(isinstance(event, TaskEnd) for event in events) == 2
    assert any(isinstance(event, TaskEvent) for event in events)


async def test_child_works_in_the_sandbox_of_its_parent() -> None:
    model = ScriptedModel(call("bash", command="pwd; cat a.txt"), "ok")
    async with scripted_session(model=model, sandbox=virtual) as session:
        await session.harness.fs.write_file("a.txt", "shared")
        await session.harness.fs.mkdir("sub")
        await session.harness.fs.write_file("sub/a.txt", "deeper")
        await session.task("look", cwd="sub")
    assert last_returns(model.requests[1])[0].text == "/workspace/sub\ndeeper"


async def test_subagent_has_its_own_instructions_model_and_tools() -> None:
    @tool
    def count() -> int:
        """Count."""
        return 3

    child_model = ScriptedModel(call("count"), "three", name="other/model")
    counter = create_agent(
        name="counter",
        description="Counts.",
        model=child_model,
        instructions="Count.",
        tools=[count],
    )
    model = ScriptedModel(call("task", prompt="how many?", agent="counter"), "3")
    async with scripted_session(model=model, sandbox=virtual, subagents=[counter]) as session:
        assert (await session.prompt("go")).text == "3"
        assert "counter: Counts." in next(
            spec.description for spec in model.requests[0].tools if spec.name == "task"
        )
        assert last_returns(model.requests[1])[0].text == "three"
        with pytest.raises(NotFound, match="Did you mean 'counter'"):
            session.task("x", agent="countr")
    assert child_model.requests[0].system.startswith("Count.")
    assert "count" in [spec.name for spec in child_model.requests[0].tools]


async def test_sandbox_of_a_subagent_is_closed_with_it() -> None:
    opened: list[Any] = []

    def open_sandbox() -> Any:
        opened.append(virtual(files={"/workspace/open_sandbox": "mine"}))
        return opened[0]

    child_model = ScriptedModel(call("bash", command="cat open_sandbox"), "ok")
    other = create_agent(name="other", model=child_model, sandbox=open_sandbox)
    async with scripted_session(sandbox=virtual, subagents=[other]) as session:
        await session.task("look", agent="other")
    assert last_returns(child_model.requests[1])[0].text == "mine"
    with pytest.raises(Exception, match="closed"):
        await opened[0].exec("ls")


async def test_unknown_subagent_is_an_error_for_the_model() -> None:
    model = ScriptedModel(call("task", prompt="x", agent="missing"), "ok")
    other = create_agent(name="other")
    async with scripted_session(model=model, sandbox=virtual, subagents=[other]) as session:
        await session.prompt("go")
    assert "no subagent 'missing'" in last_returns(model.requests[1])[0].text


async def test_tasks_nest_four_deep() -> None:
    def deeper(request: ModelRequest) -> Any:
        if any(spec.name == "task" for spec in request.tools):
            return (
                last_returns(request)[0].text
                if last_returns(request)
                else call("task", prompt="deeper")
            )
        return "the bottom"

    model = ScriptedModel(then=deeper)
    async with scripted_session(model=model, sandbox=virtual) as session:
        assert (await session.prompt("go")).text == "the bottom"
        listed = await session.harness.sessions.list(tasks=True)
        assert len(listed) == 5


async def test_session_task_cannot_nest_deeper() -> None:
    async with scripted_session(sandbox=virtual) as session:
        created = event_log(session).conversation.created
        assert created is not None
        event_log(session).conversation.created = type(created)("", depth=4)
        with pytest.raises(LimitReached, match="4 deep, not 5"):
            await session.task("deeper")


async def test_abort_stops_child_sessions() -> None:
    model = ScriptedModel(call("task", prompt="x"), Turn("working", hang=True))
    async with scripted_session(model=model, sandbox=virtual) as session:
        operation = session.prompt("go")
        async for event in operation:
            if isinstance(event, TaskEvent) and isinstance(event.event, TextEvent):
                break
        child = await session.harness.session(event.session)  # type: ignore[union-attr]
        await operation.abort()
        with pytest.raises(Aborted):
            await operation
        assert [end.outcome for end in await records_of(child, WorkEnded)] == ["aborted"]
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["aborted"]
        assert [end.outcome for end in await records_of(session, TaskEnded)] == ["aborted"]


async def test_failed_task_is_an_error_for_the_model() -> None:
    from smokebox.errors import ModelRefused

    model = ScriptedModel(
        call("task", prompt="x"), ModelRefused("no", model="m"), "it did not work"
    )
    async with scripted_session(model=model, sandbox=virtual) as session:
        assert (await session.prompt("go")).text == "it did not work"
    assert "The task failed" in last_returns(model.requests[2])[0].text


async def test_task_counts_against_the_budget_of_the_prompt() -> None:
    busy = Turn("x", usage=Usage(requests=1, input_tokens=1000))
    model = ScriptedModel(call("task", prompt="x"), busy)
    async with scripted_session(model=model, sandbox=virtual) as session:
        reply = await session.prompt("go", budget=Budget(tokens=1000))
        assert reply.stopped == "budget: tokens"
        assert len(model.requests) == 2


async def test_task_returns_a_typed_result() -> None:
    async with scripted_session(call("finish", result=[1, 2]), sandbox=virtual) as session:
        reply = await session.task("numbers", result=list[int])
        assert reply.data == [1, 2]


async def test_subagents_none_removes_the_task_tool() -> None:
    model = ScriptedModel("ok")
    async with scripted_session(model=model, sandbox=virtual, subagents=None) as session:
        await session.prompt("go")
    assert "task" not in [spec.name for spec in model.requests[0].tools]


async def test_subagent_inherits_the_approval_policy() -> None:
    child_model = ScriptedModel(call("bash", command="rm -rf /"), "denied?")
    other = create_agent(name="other", model=child_model)
    model = ScriptedModel(call("task", prompt="x", agent="other"), "ok")
    async with scripted_session(
        model=model, sandbox=virtual, subagents=[other], approval={"deny": ["bash"]}
    ) as session:
        await session.prompt("go")
    assert last_returns(child_model.requests[1])[0].is_error


async def test_deleting_a_session_deletes_its_tasks() -> None:
    async with scripted_session("x", sandbox=virtual) as session:
        await session.task("x")
        await session.delete()
        assert await session.harness.sessions.list(tasks=True) == []


async def test_parent_emits_events_of_its_child() -> None:
    async with scripted_session(
        call("task", prompt="x"), "child says", "ok", sandbox=virtual
    ) as session:
        operation = session.prompt("go")
        event = await first_event(operation, TaskEvent)
        assert event.session.startswith("task:")
        await operation
        await wait_until(lambda: session.running is None)
