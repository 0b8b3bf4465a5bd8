"""Sessions: one thing at a time, commands that the model sees, forks, and approvals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from agents.working import QUICK, at_work, event_log, first, kinds, of_kind, records, until
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


class Held:
    """A turn that waits until it is let go."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, request: ModelRequest) -> str:
        self.reached.set()
        await asyncio.wait_for(self.go.wait(), 10)
        return self.text


async def test_a_second_prompt_is_refused_while_the_first_is_worked_on() -> None:
    held = Held("one")
    async with at_work(held, "two") as session:
        operation = session.prompt("first")
        with pytest.raises(SessionBusy, match="when_busy"):
            session.prompt("second")
        held.go.set()
        assert (await operation).text == "one"
        assert (await session.prompt("second")).text == "two"


async def test_queued_prompts_are_accepted_at_once_and_done_in_their_order() -> None:
    held = Held("one")
    async with at_work(held, "two", "three") as session:
        one = session.prompt("first")
        two = session.prompt("second", when_busy="queue")
        three = session.prompt("third", when_busy="queue")
        await held.reached.wait()
        await until(lambda: len(event_log(session).conversation.work) == 3)
        held.go.set()
        assert [(await each).text for each in (one, two, three)] == ["one", "two", "three"]
        ends = await of_kind(session, WorkEnded)
        assert [end.work_id for end in ends] == [one.id, two.id, three.id]


async def test_a_queued_prompt_can_be_called_off_before_it_begins() -> None:
    held = Held("one")
    async with at_work(held) as session:
        one = session.prompt("first")
        two = session.prompt("second", when_busy="queue")
        await until(lambda: len(event_log(session).conversation.work) == 2)
        await two.abort()
        with pytest.raises(Aborted):
            await two
        held.go.set()
        assert (await one).text == "one"
        assert "second" not in str(await session.messages())


async def test_a_prompt_that_joins_is_told_at_the_next_turn() -> None:
    held = Held("thinking about the first")
    model = ScriptedModel(held, "an answer to both")
    async with at_work(model=model) as session:
        one = session.prompt("first")
        await held.reached.wait()
        two = session.prompt("second", when_busy="join")
        await until(lambda: len(event_log(session).conversation.work) == 2)
        held.go.set()
        assert (await one).text == (await two).text == "an answer to both"
        assert last_text(model.requests[1]) == "second"
        ends = await of_kind(session, WorkEnded)
        assert {end.work_id: end.usage.requests for end in ends} == {one.id: 2, two.id: 0}
    assert len(model.requests) == 2


async def test_a_prompt_that_has_nobody_to_join_is_worked_on_by_itself() -> None:
    async with at_work("alone") as session:
        assert (await session.prompt("first", when_busy="join")).text == "alone"
        with pytest.raises(InvalidOption, match="takes no options"):
            session.prompt("second", when_busy="join", result=int)
        with pytest.raises(InvalidOption, match="when_busy"):
            session.prompt("second", when_busy="wait")  # type: ignore[call-overload]


async def test_a_session_that_another_holds_is_busy() -> None:
    store = MemoryStore()
    async with at_work("one", persist=store) as session:
        writer = await store.open(session.key)
        with pytest.raises(SessionBusy):
            await session.prompt("first")
        queued = session.prompt("second", when_busy="queue")
        await writer.release()
        assert (await queued).text == "one"


async def test_what_another_process_added_is_seen() -> None:
    store, model = MemoryStore(), ScriptedModel(then="yes")
    agent = create_agent(model=model, sandbox=None, durability=QUICK)
    async with init(agent, id="x", store=store) as one, init(agent, id="x", store=store) as two:
        here, there = await one.session(), await two.session()
        await here.prompt("from one")
        await there.prompt("from two")
        assert len(await here.messages()) == 4
        await here.prompt("again")
        assert len(model.requests[-1].messages) == 5


async def test_work_of_one_key_is_done_once() -> None:
    model = ScriptedModel("only once", call("finish", result=7))
    async with at_work(model=model) as session:
        assert (await session.prompt("go", key="k")).text == "only once"
        assert (await session.prompt("go", key="k")).text == "only once"
        assert (await session.prompt("7", key="n", result=int)).data == 7
        assert (await session.prompt("7", key="n", result=int)).data == 7
    assert len(model.requests) == 2


async def test_work_of_one_key_that_is_under_way_is_shared() -> None:
    held = Held("shared")
    async with at_work(held) as session:
        one = session.prompt("go", key="k")
        await held.reached.wait()
        two = session.prompt("go", key="k")
        assert two is one
        held.go.set()
        assert (await two).text == "shared"


async def test_failed_work_of_a_key_fails_alike_when_asked_for_again() -> None:
    async with at_work(Turn(hang=True)) as session:
        operation = session.prompt("go", key="k")
        await until(lambda: event_log(session).conversation.work)
        await operation.abort("no")
        with pytest.raises(Aborted, match="no"):
            await session.prompt("go", key="k")


async def test_a_command_is_shown_to_the_model_without_secrets() -> None:
    model = ScriptedModel("I see")
    async with at_work(model=model, sandbox=virtual) as session:
        operation = session.shell("echo $TOKEN; exit 3", env={"TOKEN": "hunter22"})
        events = [event async for event in operation]
        result = await operation
        assert (result.stdout, result.exit_code) == ("hunter22\n", 3)
        await session.prompt("What did I do?")
        told = str(model.requests[0].messages)
        assert "echo $TOKEN" in told
        assert "<redacted>" in told
        assert "Exit code: 3" in told
        assert "hunter22" not in str(await records(session))
        (accepted, _) = await of_kind(session, WorkAccepted)
        assert accepted.options["env"] == {"TOKEN": "<redacted>"}
    assert any(isinstance(event, ToolOutput) for event in events)
    assert any(isinstance(event, ToolEnd) for event in events)


async def test_an_aborted_command_is_killed_and_recorded() -> None:
    from smokebox import local

    async with at_work(sandbox=local) as session:
        operation = session.shell("echo up; exec sleep 60")
        await first(operation, ToolOutput)
        await operation.abort()
        with pytest.raises(Aborted):
            await operation
        assert "did not come to its end" in str(await session.messages())
        assert [end.outcome for end in await of_kind(session, WorkEnded)] == ["aborted"]


async def test_a_skill_is_what_the_agent_is_told_to_do() -> None:
    skill = Skill(name="greet", description="Greets.", instructions="Say hello nicely.")
    model = ScriptedModel("Hello!")
    async with at_work(model=model, skills=[skill]) as session:
        assert (await session.skill("greet", {"whom": "Ann"})).text == "Hello!"
        told = last_text(model.requests[0])
        assert "Say hello nicely." in told
        assert '"whom": "Ann"' in told
        with pytest.raises(NotFound, match="Did you mean 'greet'"):
            session.skill("greeet")


async def test_skills_put_into_the_workspace_before_the_session_are_found() -> None:
    model = ScriptedModel("done")
    async with init(model=model, persist=False) as harness:
        manifest = "---\nname: tidy\ndescription: Tidies up.\n---\nPut things away.\n"
        await harness.fs.write_file(".agents/skills/tidy/SKILL.md", manifest)
        session = await harness.session()
        await session.skill("tidy")
    assert "Put things away." in last_text(model.requests[0])
    assert "tidy: Tidies up." in model.requests[0].system


async def test_compacting_by_hand_gives_the_summary_the_model_then_sees() -> None:
    model = ScriptedModel("one", "two", "The gist.", "after")
    async with at_work(model=model, compaction={"keep_recent": 0}) as session:
        await session.prompt("first")
        await session.prompt("second")
        summary = await session.compact("numbers")
        assert "The gist." in summary
        assert "numbers" in str(model.requests[2].messages)
        await session.prompt("third")
        assert "The gist." in str(model.requests[3].messages[0])
        assert len(model.requests[3].messages) < 5


async def test_compacting_nothing_gives_nothing() -> None:
    async with at_work() as session:
        assert await session.compact() == ""


async def test_a_fork_begins_with_what_was_said_and_goes_its_own_way() -> None:
    model = ScriptedModel(then="ok")
    async with at_work(model=model) as session:
        await session.prompt("shared")
        fork = await session.fork("other")
        await fork.prompt("only there")
        await session.prompt("only here")
        assert "only there" not in str(await session.messages())
        assert [len(await one.messages()) for one in (session, fork)] == [4, 4]
        assert fork._context.system == session._context.system
        with pytest.raises(SmokeboxError, match="already"):
            await session.fork("other")


async def test_a_deleted_session_takes_no_prompt_and_leaves_nothing() -> None:
    held = Held("never")
    async with at_work(held) as session:
        operation = session.prompt("go")
        await held.reached.wait()
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


async def test_a_call_that_needs_approval_waits_for_it() -> None:
    model = ScriptedModel(call("deploy", to="prod"), "done")
    async with at_work(model=model, tools=[deploy], approval={"ask": ["deploy"]}) as session:
        operation = session.prompt("go")
        needed = await first(operation, ApprovalNeeded)
        assert (needed.name, needed.arguments) == ("deploy", {"to": "prod"})
        assert "ToolStarted" not in await kinds(session)
        await until(lambda: session.approvals == [needed])
        await session.approve(needed.call_id)
        assert (await operation).text == "done"
        assert last_returns(model.requests[1])[0].text == "deployed to prod"
        with pytest.raises(NotFound, match="waits for approval"):
            await session.approve(needed.call_id)


async def test_a_call_that_is_denied_does_not_run_and_the_model_is_told_why() -> None:
    model = ScriptedModel(call("deploy", to="prod"), call("deploy", to="test"), "pity")
    approval = {"deny": {"deploy": lambda args: args["to"] == "test"}, "ask": ["deploy"]}
    async with at_work(model=model, tools=[deploy], approval=approval) as session:
        operation = session.prompt("go")
        needed = await first(operation, ApprovalNeeded)
        await until(lambda: session.approvals)
        await session.deny(needed.call_id, "not on a Friday")
        assert (await operation).text == "pity"
        assert "not on a Friday" in last_returns(model.requests[1])[0].text
        assert [one.status for one in await of_kind(session, ToolEnded)] == ["denied", "denied"]
        assert "ToolStarted" not in await kinds(session)


async def test_a_rule_for_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'deploy'"):
        await init(tools=[deploy], approval={"ask": ["deplooy"]}, persist=False)


async def test_changed_tools_and_instructions_are_told_and_not_rewritten() -> None:
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
    told = [
        message
        for message in model.requests[-1].messages
        if isinstance(message, UserMessage) and message.signal == "resources"
    ]
    assert len(told) == 1
    assert "deploy" in str(told)
    assert "Be brief." in str(told)
    assert len(await of_kind(session, ResourcesChanged)) == 1


async def test_closing_the_harness_calls_off_what_goes_on() -> None:
    store = MemoryStore()
    async with at_work(Turn("x", hang=True), persist=store) as session:
        operation = session.prompt("go")
        await first(operation, TextEvent)
    with pytest.raises(Aborted, match="harness was closed"):
        await operation
    (end,) = [one for one in await records(session) if isinstance(one, WorkEnded)]
    assert end.outcome == "aborted"


@pytest.mark.parametrize("text", ["", " \n"])
async def test_a_prompt_says_something(text: str) -> None:
    async with at_work("x") as session:
        with pytest.raises(InvalidOption, match="prompt is empty"):
            session.prompt(text)


async def test_a_prompt_is_text() -> None:
    async with at_work() as session:
        with pytest.raises(InvalidOption, match="a prompt is a str"):
            session.prompt(["hello"])  # type: ignore[call-overload]
        with pytest.raises(InvalidOption, match="no option 'temperature'"):
            session.prompt("hello", temperature=1)  # type: ignore[call-overload]


async def test_messages_are_a_copy() -> None:
    async with at_work("hi") as session:
        await session.prompt("hello")
        messages = await session.messages()
        assert messages[0] == UserMessage((Text("hello"),))
        messages.clear()
        assert len(await session.messages()) == 2
