"""Tests of sessions: queued work, shell commands, skills, forks and approvals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from agents.scripted_session import (
    QUICK,
    event_log,
    first_event,
    record_names,
    records,
    records_of,
    scripted_session,
    wait_until,
)
from smokebox import Skill, create_agent, init, tool, virtual
from smokebox.agents.events import ApprovalNeeded, TextEvent, ToolEnd, ToolOutput
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.records import ResourcesChanged, ToolEnded, WorkAccepted, WorkEnded
from smokebox.agents.messages import Text, UserMessage
from smokebox.errors import (
    Aborted,
    InvalidOption,
    NotFound,
    SessionBusy,
    SmokeboxError,
)
from smokebox.testing import ScriptedModel, Turn, call, last_returns, last_text

if TYPE_CHECKING:
    from smokebox.agents.model import ModelRequest


class BlockedTurn:
    """A turn that blocks until `proceed` is set."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.reached = asyncio.Event()
        self.proceed = asyncio.Event()

    async def __call__(self, request: ModelRequest) -> str:
        self.reached.set()
        await asyncio.wait_for(self.proceed.wait(), 10)
        return self.text


async def test_second_prompt_raises_session_busy() -> None:
    blocked = BlockedTurn("one")
    async with scripted_session(blocked, "two") as session:
        operation = session.prompt("first")
        with pytest.raises(SessionBusy, match="when_busy"):
            session.prompt("second")
        blocked.proceed.set()
        assert (await operation).text == "one"
        assert (await session.prompt("second")).text == "two"


async def test_queued_prompts_run_in_order() -> None:
    blocked = BlockedTurn("one")
    async with scripted_session(blocked, "two", "three") as session:
        one = session.prompt("first")
        two = session.prompt("second", when_busy="queue")
        three = session.prompt("third", when_busy="queue")
        await blocked.reached.wait()
        await wait_until(lambda: len(event_log(session).conversation.work) == 3)
        blocked.proceed.set()
        assert [(await each).text for each in (one, two, three)] == ["one", "two", "three"]
        ends = await records_of(session, WorkEnded)
        assert [end.work_id for end in ends] == [one.id, two.id, three.id]


async def test_queued_prompt_can_be_aborted() -> None:
    blocked = BlockedTurn("one")
    async with scripted_session(blocked) as session:
        one = session.prompt("first")
        two = session.prompt("second", when_busy="queue")
        await wait_until(lambda: len(event_log(session).conversation.work) == 2)
        await two.abort()
        with pytest.raises(Aborted):
            await two
        blocked.proceed.set()
        assert (await one).text == "one"
        assert "second" not in str(await session.messages())


async def test_joining_prompt_is_added_at_the_next_turn() -> None:
    blocked = BlockedTurn("thinking about the first")
    model = ScriptedModel(blocked, "an answer to both")
    async with scripted_session(model=model) as session:
        one = session.prompt("first")
        await blocked.reached.wait()
        two = session.prompt("second", when_busy="join")
        await wait_until(lambda: len(event_log(session).conversation.work) == 2)
        blocked.proceed.set()
        assert (await one).text == (await two).text == "an answer to both"
        assert last_text(model.requests[1]) == "second"
        ends = await records_of(session, WorkEnded)
        assert {end.work_id: end.usage.requests for end in ends} == {one.id: 2, two.id: 0}
    assert len(model.requests) == 2


async def test_joining_prompt_runs_alone_in_an_idle_session() -> None:
    async with scripted_session("alone") as session:
        assert (await session.prompt("first", when_busy="join")).text == "alone"
        with pytest.raises(InvalidOption, match="takes no options"):
            session.prompt("second", when_busy="join", result=int)
        with pytest.raises(InvalidOption, match="when_busy"):
            session.prompt("second", when_busy="wait")  # type: ignore[call-overload]


async def test_session_with_another_writer_is_busy() -> None:
    store = MemoryStore()
    async with scripted_session("one", persist=store) as session:
        writer = await store.open(session.key)
        with pytest.raises(SessionBusy):
            await session.prompt("first")
        queued = session.prompt("second", when_busy="queue")
        await writer.release()
        assert (await queued).text == "one"


async def test_records_of_another_harness_are_seen() -> None:
    store, model = MemoryStore(), ScriptedModel(then="yes")
    agent = create_agent(model=model, sandbox=None, durability=QUICK)
    async with init(agent, id="x", store=store) as one, init(agent, id="x", store=store) as two:
        here, there = await one.session(), await two.session()
        await here.prompt("from one")
        await there.prompt("from two")
        assert len(await here.messages()) == 4
        await here.prompt("again")
        assert len(model.requests[-1].messages) == 5


async def test_work_with_the_same_key_runs_once() -> None:
    model = ScriptedModel("only once", call("finish", result=7))
    async with scripted_session(model=model) as session:
        assert (await session.prompt("go", key="k")).text == "only once"
        assert (await session.prompt("go", key="k")).text == "only once"
        assert (await session.prompt("7", key="n", result=int)).data == 7
        assert (await session.prompt("7", key="n", result=int)).data == 7
    assert len(model.requests) == 2


async def test_running_work_with_the_same_key_is_shared() -> None:
    blocked = BlockedTurn("shared")
    async with scripted_session(blocked) as session:
        one = session.prompt("go", key="k")
        await blocked.reached.wait()
        two = session.prompt("go", key="k")
        assert two is one
        blocked.proceed.set()
        assert (await two).text == "shared"


async def test_failed_work_with_a_key_fails_again() -> None:
    async with scripted_session(Turn(hang=True)) as session:
        operation = session.prompt("go", key="k")
        await wait_until(lambda: event_log(session).conversation.work)
        await operation.abort("no")
        with pytest.raises(Aborted, match="no"):
            await session.prompt("go", key="k")


async def test_shell_redacts_env_values() -> None:
    model = ScriptedModel("I see")
    async with scripted_session(model=model, sandbox=virtual) as session:
        operation = session.shell("echo $TOKEN; exit 3", env={"TOKEN": "hunter22"})
        events = [event async for event in operation]
        result = await operation
        assert (result.stdout, result.exit_code) == ("hunter22\n", 3)
        await session.prompt("What did I do?")
        text = str(model.requests[0].messages)
        assert "echo $TOKEN" in text
        assert "<redacted>" in text
        assert "Exit code: 3" in text
        assert "hunter22" not in str(await records(session))
        (accepted, _) = await records_of(session, WorkAccepted)
        assert accepted.options["env"] == {"TOKEN": "<redacted>"}
    assert any(isinstance(event, ToolOutput) for event in events)
    assert any(isinstance(event, ToolEnd) for event in events)


async def test_aborted_shell_command_is_killed_and_recorded() -> None:
    from smokebox import local

    async with scripted_session(sandbox=local) as session:
        operation = session.shell("echo up; exec sleep 60")
        await first_event(operation, ToolOutput)
        await operation.abort()
        with pytest.raises(Aborted):
            await operation
        assert "did not finish" in str(await session.messages())
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["aborted"]


async def test_skill_sends_its_instructions() -> None:
    skill = Skill(name="greet", description="Greets.", instructions="Say hello nicely.")
    model = ScriptedModel("Hello!")
    async with scripted_session(model=model, skills=[skill]) as session:
        assert (await session.skill("greet", {"whom": "Ann"})).text == "Hello!"
        text = last_text(model.requests[0])
        assert "Say hello nicely." in text
        assert '"whom": "Ann"' in text
        with pytest.raises(NotFound, match="Did you mean 'greet'"):
            session.skill("greeet")


async def test_skills_in_the_workspace_are_found() -> None:
    model = ScriptedModel("done")
    async with init(model=model, persist=False) as harness:
        manifest = "---\nname: tidy\ndescription: Tidies up.\n---\nPut things away.\n"
        await harness.fs.write_file(".agents/skills/tidy/SKILL.md", manifest)
        session = await harness.session()
        await session.skill("tidy")
    assert "Put things away." in last_text(model.requests[0])
    assert "tidy: Tidies up." in model.requests[0].system


async def test_compact_returns_the_summary_that_the_model_sees() -> None:
    model = ScriptedModel("one", "two", "The gist.", "after")
    async with scripted_session(model=model, compaction={"keep_recent": 0}) as session:
        await session.prompt("first")
        await session.prompt("second")
        summary = await session.compact("numbers")
        assert "The gist." in summary
        assert "numbers" in str(model.requests[2].messages)
        await session.prompt("third")
        assert "The gist." in str(model.requests[3].messages[0])
        assert len(model.requests[3].messages) < 5


async def test_compact_of_empty_session_returns_empty_text() -> None:
    async with scripted_session() as session:
        assert await session.compact() == ""


async def test_fork_starts_with_the_conversation() -> None:
    model = ScriptedModel(then="ok")
    async with scripted_session(model=model) as session:
        await session.prompt("shared")
        fork = await session.fork("other")
        await fork.prompt("only there")
        await session.prompt("only here")
        assert "only there" not in str(await session.messages())
        assert [len(await one.messages()) for one in (session, fork)] == [4, 4]
        assert fork._context.system == session._context.system
        with pytest.raises(SmokeboxError, match="already"):
            await session.fork("other")


async def test_deleted_session_refuses_prompts() -> None:
    blocked = BlockedTurn("never")
    async with scripted_session(blocked) as session:
        operation = session.prompt("go")
        await blocked.reached.wait()
        await session.delete()
        with pytest.raises(Aborted):
            await operation
        with pytest.raises(NotFound, match="was deleted"):
            session.prompt("again")
        assert await session.harness.sessions.list() == []
        fresh = await session.harness.session()
        assert await fresh.messages() == []


@tool
def deploy(to: str) -> str:
    """Deploy."""
    return f"deployed to {to}"


async def test_call_waits_for_approval() -> None:
    model = ScriptedModel(call("deploy", to="prod"), "done")
    async with scripted_session(
        model=model, tools=[deploy], approval={"ask": ["deploy"]}
    ) as session:
        operation = session.prompt("go")
        needed = await first_event(operation, ApprovalNeeded)
        assert (needed.name, needed.arguments) == ("deploy", {"to": "prod"})
        assert "ToolStarted" not in await record_names(session)
        await wait_until(lambda: session.approvals == [needed])
        await session.approve(needed.call_id)
        assert (await operation).text == "done"
        assert last_returns(model.requests[1])[0].text == "deployed to prod"
        with pytest.raises(NotFound, match="waits for approval"):
            await session.approve(needed.call_id)


async def test_denied_call_does_not_run() -> None:
    model = ScriptedModel(call("deploy", to="prod"), call("deploy", to="test"), "pity")
    approval = {"deny": {"deploy": lambda args: args["to"] == "test"}, "ask": ["deploy"]}
    async with scripted_session(model=model, tools=[deploy], approval=approval) as session:
        operation = session.prompt("go")
        needed = await first_event(operation, ApprovalNeeded)
        await wait_until(lambda: session.approvals)
        await session.deny(needed.call_id, "not on a Friday")
        assert (await operation).text == "pity"
        assert "not on a Friday" in last_returns(model.requests[1])[0].text
        assert [one.status for one in await records_of(session, ToolEnded)] == ["denied", "denied"]
        assert "ToolStarted" not in await record_names(session)


async def test_approval_rule_for_unknown_tool_is_refused() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'deploy'"):
        await init(tools=[deploy], approval={"ask": ["deplooy"]}, persist=False)


async def test_changed_tools_and_instructions_are_announced_once() -> None:
    store, model = MemoryStore(), ScriptedModel(then="ok")

    def agent(**options: Any) -> Any:
        return create_agent(model=model, sandbox=None, **options)

    async with init(agent(instructions="Be kind."), id="x", store=store) as harness:
        await (await harness.session()).prompt("one")
    changed = agent(instructions="Be brief.", tools=[deploy])
    for _ in range(2):
        async with init(changed, id="x", store=store) as harness:
            session = await harness.session()
            await session.prompt("two")
    assert {request.system for request in model.requests} == {"Be kind."}
    announced = [
        message
        for message in model.requests[-1].messages
        if isinstance(message, UserMessage) and message.signal == "resources"
    ]
    assert len(announced) == 1
    assert "deploy" in str(announced)
    assert "Be brief." in str(announced)
    assert len(await records_of(session, ResourcesChanged)) == 1


async def test_closing_the_harness_aborts_work() -> None:
    store = MemoryStore()
    async with scripted_session(Turn("x", hang=True), persist=store) as session:
        operation = session.prompt("go")
        await first_event(operation, TextEvent)
    with pytest.raises(Aborted, match="harness was closed"):
        await operation
    (end,) = [one for one in await records(session) if isinstance(one, WorkEnded)]
    assert end.outcome == "aborted"


@pytest.mark.parametrize("text", ["", " \n"])
async def test_empty_prompt_is_refused(text: str) -> None:
    async with scripted_session("x") as session:
        with pytest.raises(InvalidOption, match="prompt is empty"):
            session.prompt(text)


async def test_wrong_prompt_arguments_are_refused() -> None:
    async with scripted_session() as session:
        with pytest.raises(InvalidOption, match="a prompt is a str"):
            session.prompt(["hello"])  # type: ignore[call-overload]
        with pytest.raises(InvalidOption, match="no option 'temperature'"):
            session.prompt("hello", temperature=1)  # type: ignore[call-overload]


async def test_messages_returns_a_copy() -> None:
    async with scripted_session("hi") as session:
        await session.prompt("hello")
        messages = await session.messages()
        assert messages[0] == UserMessage((Text("hello"),))
        messages.clear()
        assert len(await session.messages()) == 2
