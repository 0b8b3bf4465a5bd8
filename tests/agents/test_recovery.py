"""Recovery: whatever was recorded when a process was killed, each piece of accepted work gets
one outcome, and no tool that may have run is run again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from agents.working import QUICK, event_log, first, of_kind, records, until
from smokebox import Durability, create_agent, init, tool, virtual
from smokebox.agents import ToolContext  # noqa: TC001
from smokebox.agents.events import ApprovalNeeded
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.records import (
    AbortRequested,
    MessageAdded,
    SessionCreated,
    ToolEnded,
    ToolStarted,
    WorkAccepted,
    WorkEnded,
    WorkStarted,
)
from smokebox.agents.messages import Text, ToolReturns, UserMessage
from smokebox.errors import Aborted, DeadlineExceeded, LimitReached, SmokeboxError
from smokebox.testing import ScriptedModel, Turn, call, last_returns, last_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents import Agent, Session
    from smokebox.agents.log.records import Record, StoredRecord
    from smokebox.agents.log.store import SessionKey
    from smokebox.agents.model import ModelRequest


class Counter:
    """A tool whose effects are counted."""

    def __init__(self, *, durable: bool = False) -> None:
        self.keys: list[str] = []

        @tool(name="count", durable=durable)
        async def count() -> str:
            """Count."""
            self.keys.append("ran")
            return f"counted {len(self.keys)}"

        self.tool = count


def worker(request: ModelRequest) -> Any:
    """Counts twice, then says so; whatever it was told last."""
    done = sum(isinstance(message, ToolReturns) for message in request.messages)
    return call("count") if done < 2 else "counted"


def agent_of(counter: Counter, answer: Any = worker, **options: Any) -> Agent:
    options.setdefault("sandbox", None)
    options.setdefault("durability", QUICK)
    return create_agent(model=ScriptedModel(then=answer), tools=[counter.tool], **options)


async def everything(store: MemoryStore) -> list[tuple[SessionKey, StoredRecord]]:
    """All records of a store in the order in which they were written."""
    found = [
        (summary.key, stored)
        for summary in await store.sessions()
        for stored in await store.read(summary.key)
    ]
    return sorted(found, key=lambda one: (one[1].at, one[1].offset))


async def killed_after(written: list[tuple[SessionKey, StoredRecord]]) -> MemoryStore:
    """A store with that record, and nobody who is at work on it."""
    store = MemoryStore()
    for key, stored in written:
        writer = await store.open(key)
        await writer.append([stored.record])
        await writer.release()
    return store


async def recovered(store: MemoryStore, agent: Agent) -> AsyncIterator[Session]:
    """The session, once all that was left of it has ended."""
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        while (running := session.running) is not None:
            async with asyncio.timeout(10):
                await running.wait()
                await until(lambda: session.running is not running)
        yield session


def assert_one_outcome_each(found: list[Record]) -> None:
    accepted = [one.work_id for one in found if isinstance(one, WorkAccepted)]
    ended = [one.work_id for one in found if isinstance(one, WorkEnded)]
    assert sorted(accepted) == sorted(ended)


@pytest.mark.parametrize("durable", [False, True])
async def test_killed_after_any_record_the_work_ends_once_and_nothing_is_repeated(
    durable: bool,
) -> None:
    counter = Counter(durable=durable)
    store = MemoryStore()
    async with init(agent_of(counter), id="x", store=store) as harness:
        await (await harness.session()).prompt("count twice")
    written = await everything(store)
    for cut in range(1, len(written) + 1):
        again = Counter(durable=durable)
        async for session in recovered(await killed_after(written[:cut]), agent_of(again)):
            found = await records(session)
            assert_one_outcome_each(found)
            started = [one.call_id for one in found if isinstance(one, ToolStarted)]
            before = [
                stored.record.call_id
                for _, stored in written[:cut]
                if isinstance(stored.record, ToolStarted)
            ]
            if not durable:
                # What had started then is not among what ran now.
                assert len(again.keys) == len(started) - len(before)
                assert len(set(started)) == len(started)
            await session.prompt("and now?")
            assert_one_outcome_each(await records(session))


async def test_a_tool_that_was_running_is_told_to_the_model_as_unknown() -> None:
    counter = Counter()
    store = MemoryStore()
    async with init(agent_of(counter), id="x", store=store) as harness:
        await (await harness.session()).prompt("count twice")
    written = await everything(store)
    at = next(n for n, (_, one) in enumerate(written) if isinstance(one.record, ToolStarted))
    again = Counter()
    agent = agent_of(again)
    async for session in recovered(await killed_after(written[: at + 1]), agent):
        (unknown, _) = await of_kind(session, ToolEnded)
        assert unknown.status == "unknown"
        assert len(again.keys) == 1
        assert "not known" in str(await session.messages())


async def test_a_durable_tool_runs_again_with_the_same_key() -> None:
    seen: list[tuple[str, int]] = []

    async def pay(ctx: ToolContext) -> str:
        """Pay."""
        seen.append((ctx.key, ctx.attempt))
        return "paid"

    def answer(request: ModelRequest) -> Any:
        return "done" if last_returns(request) else call("pay", call_id="c1")

    agent = create_agent(
        model=ScriptedModel(then=answer),
        tools=[tool(durable=True)(pay)],
        sandbox=None,
        durability=QUICK,
    )
    store = MemoryStore()
    async with init(agent, id="x", store=store) as harness:
        await (await harness.session()).prompt("pay")
    written = await everything(store)
    at = next(n for n, (_, one) in enumerate(written) if isinstance(one.record, ToolStarted))
    async for session in recovered(await killed_after(written[: at + 1]), agent):
        assert seen == [(seen[0][0], 1), (seen[0][0], 2)]
        assert [one.outcome for one in await of_kind(session, WorkEnded)] == ["completed"]


async def test_the_recovered_operation_can_be_awaited_and_watched() -> None:
    store = await killed_before_the_answer("x")
    agent = agent_of(Counter(), answer="here it is")
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        assert (await session.running).text == "here it is"


async def killed_before_the_answer(*keys: str, **accepted: Any) -> MemoryStore:
    """A store whose session was asked something, and not answered."""
    from smokebox.agents.log.store import SessionKey

    store = MemoryStore()
    writer = await store.open(SessionKey("agent", "x", "default"))
    said = UserMessage((Text("Where is it?"),))
    await writer.append([SessionCreated("system")])
    for work in keys:
        await writer.append([WorkAccepted(work, "prompt", said, **accepted)])
    await writer.append([WorkStarted(keys[0]), MessageAdded(keys[0], said)])
    await writer.release()
    return store


async def test_work_that_was_queued_is_done_in_its_order() -> None:
    store = await killed_before_the_answer("one", "two")
    async for session in recovered(store, agent_of(Counter(), answer="answer")):
        assert [end.work_id for end in await of_kind(session, WorkEnded)] == ["one", "two"]


async def test_a_new_prompt_comes_after_what_was_left() -> None:
    store = await killed_before_the_answer("one")
    model = ScriptedModel(then=lambda request: f"re: {last_text(request)}")
    agent = create_agent(model=model, sandbox=None, durability=QUICK)
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert (await session.prompt("new", when_busy="queue")).text == "re: new"
        assert [end.text for end in await of_kind(session, WorkEnded)] == [
            "re: Where is it?",
            "re: new",
        ]


async def test_what_another_left_is_found_by_a_session_that_is_open_already() -> None:
    store = MemoryStore()
    model = ScriptedModel(then=lambda request: f"re: {last_text(request)}")
    agent = create_agent(model=model, sandbox=None, durability=QUICK)
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        writer = await store.open(session.key)
        said = UserMessage((Text("left"),))
        await writer.append([WorkAccepted("one", "prompt", said), WorkStarted("one")])
        await writer.append([MessageAdded("one", said)])
        await writer.release()
        assert (await session.prompt("new")).text == "re: new"
        assert (await of_kind(session, WorkEnded))[0].work_id == "one"


async def test_work_that_was_called_off_stays_so() -> None:
    store = await killed_before_the_answer("one")
    from smokebox.agents.log.store import SessionKey

    writer = await store.open(SessionKey("agent", "x", "default"))
    await writer.append([AbortRequested("one")])
    await writer.release()
    agent = agent_of(Counter(), answer="too late")
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        if session.running is not None:
            with pytest.raises(Aborted):
                await session.running
        assert [end.outcome for end in await of_kind(session, WorkEnded)] == ["aborted"]


async def test_work_is_not_begun_for_ever() -> None:
    store = await killed_before_the_answer("one")
    agent = agent_of(Counter(), answer="x", durability=Durability(max_attempts=1))
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        with pytest.raises(LimitReached, match="begun 1 times"):
            await session.running


async def test_work_that_is_too_old_fails() -> None:
    store = await killed_before_the_answer("one", options={"timeout": 0.001})
    accepted = time.time()
    await until(lambda: time.time() > accepted + 0.001)
    agent = agent_of(Counter(), answer="x")
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        with pytest.raises(DeadlineExceeded):
            await session.running


async def test_a_structured_result_survives_as_what_json_has() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    store = await killed_before_the_answer("one", options={"result": schema})
    agent = agent_of(Counter(), answer=call("finish", n=3))
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        assert (await session.running).data == {"n": 3}


async def test_a_result_killed_at_any_record_is_handed_in_once() -> None:
    model_turns = [call("count"), call("finish", result=5)]

    def answer(request: ModelRequest) -> Any:
        return model_turns[min(1, sum(isinstance(m, ToolReturns) for m in request.messages))]

    store = MemoryStore()
    async with init(agent_of(Counter(), answer), id="x", store=store) as harness:
        assert (await (await harness.session()).prompt("go", result=int)).data == 5
    written = await everything(store)
    for cut in range(1, len(written) + 1):
        async for session in recovered(
            await killed_after(written[:cut]), agent_of(Counter(), answer)
        ):
            found = await records(session)
            assert_one_outcome_each(found)
            ends = [one for one in found if isinstance(one, WorkEnded)]
            assert all(one.outcome == "completed" for one in ends)


async def test_an_approval_is_waited_for_again() -> None:
    def answer(request: ModelRequest) -> Any:
        return "done" if last_returns(request) else call("count")

    store = MemoryStore()
    counter = Counter()
    policy = {"ask": ["count"]}
    agent = agent_of(counter, answer, approval=policy)
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        operation = session.prompt("go")
        await first(operation, ApprovalNeeded)
        written = await everything(store)
        await operation.abort()
    again = await killed_after(written)
    async with init(agent, id="x", store=again) as harness:
        session = await harness.session()
        running = session.running
        assert running is not None
        needed = await first(running, ApprovalNeeded)
        await until(lambda: session.approvals)
        assert counter.keys == []
        await session.approve(needed.call_id)
        assert (await running).text == "done"
        assert counter.keys == ["ran"]


async def test_tasks_killed_at_any_record_are_gone_on_with() -> None:
    def answer(request: ModelRequest) -> Any:
        if back := last_returns(request):
            return f"heard: {back[0].text}"
        return "did it" if last_text(request) == "child" else call("task", prompt="child")

    def agent() -> Agent:
        return create_agent(
            model=ScriptedModel(then=answer), sandbox=virtual, durability=QUICK, name="agent"
        )

    store = MemoryStore()
    async with init(agent(), id="x", store=store) as harness:
        await (await harness.session()).prompt("go")
    written = await everything(store)
    for cut in range(2, len(written) + 1):
        again = await killed_after(written[:cut])
        async for session in recovered(again, agent()):
            for summary in await again.sessions():
                found = [one.record for one in await again.read(summary.key)]
                assert_one_outcome_each(found)
            ends = await of_kind(session, WorkEnded)
            assert all(end.text in ("heard: did it",) for end in ends), cut
            children = [one for one in await again.sessions() if one.parent]
            assert len(children) <= 1


async def test_a_task_of_code_is_gone_on_with() -> None:
    agent = create_agent(model=ScriptedModel(then="did it"), sandbox=virtual, durability=QUICK)
    store = MemoryStore()
    async with init(agent, id="x", store=store) as harness:
        await (await harness.session()).task("child")
    written = await everything(store)
    for cut in range(2, len(written) + 1):
        async for session in recovered(await killed_after(written[:cut]), agent):
            found = await records(session)
            assert_one_outcome_each(found)
            assert all(one.text == "did it" for one in found if isinstance(one, WorkEnded))


async def test_a_command_that_may_have_run_is_not_run_again() -> None:
    agent = create_agent(model=ScriptedModel(then="ok"), sandbox=virtual, durability=QUICK)
    store = MemoryStore()
    async with init(agent, id="x", store=store) as harness:
        await (await harness.session()).shell("echo hi >> log")
    written = [one for one in await everything(store) if not isinstance(one[1].record, WorkEnded)]
    again = await killed_after(written[:3])
    async with init(agent, id="x", store=again) as harness:
        session = await harness.session()
        assert session.running is not None
        with pytest.raises(SmokeboxError, match="not known"):
            await session.running
        assert not await harness.fs.exists("log")
        assert "not known whether it ran" in str(await session.messages())


async def test_a_summary_killed_at_any_record_is_made_once() -> None:
    def answer(request: ModelRequest) -> str:
        return "The gist." if "summarize" in request.system else "ok"

    agent = create_agent(
        model=ScriptedModel(then=answer),
        sandbox=None,
        durability=QUICK,
        compaction={"keep_recent": 0},
    )
    store = MemoryStore()
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        await session.prompt("one")
        await session.prompt("two")
        await session.compact()
    written = await everything(store)
    for cut in range(1, len(written) + 1):
        async for session in recovered(await killed_after(written[:cut]), agent):
            assert_one_outcome_each(await records(session))
            assert (await session.prompt("go on")).text == "ok"


async def test_work_is_left_to_be_gone_on_with_when_the_event_loop_ends() -> None:
    store = MemoryStore()
    agent = create_agent(model=ScriptedModel(Turn("x", hang=True)), sandbox=None)

    async def program() -> None:
        harness = await init(agent, id="x", store=store)
        session = await harness.session()
        session.prompt("go")
        await until(lambda: event_log(session).conversation.unfinished)

    await asyncio.to_thread(asyncio.run, program())
    (summary,) = await store.sessions()
    assert summary.unfinished == 1
    later = create_agent(model=ScriptedModel(then="here"), sandbox=None, durability=QUICK)
    async for session in recovered(store, later):
        assert [end.text for end in await of_kind(session, WorkEnded)] == ["here"]
