"""Tests of recovery: after a crash at any record, accepted work gets exactly one outcome, and no
tool that may have run is run again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from agents.scripted_session import QUICK, event_log, first_event, records, records_of, wait_until
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
    """A tool that counts its runs."""

    def __init__(self, *, durable: bool = False) -> None:
        self.keys: list[str] = []

        @tool(name="count", durable=durable)
        async def count() -> str:
            """Count."""
            self.keys.append("ran")
            return f"counted {len(self.keys)}"

        self.tool = count


def count_twice(request: ModelRequest) -> Any:
    """Reply with a call of `count` twice, then with text."""
    done = sum(isinstance(message, ToolReturns) for message in request.messages)
    return call("count") if done < 2 else "counted"


def agent_of(counter: Counter, answer: Any = count_twice, **options: Any) -> Agent:
    options.setdefault("sandbox", None)
    options.setdefault("durability", QUICK)
    return create_agent(model=ScriptedModel(then=answer), tools=[counter.tool], **options)


async def all_records(store: MemoryStore) -> list[tuple[SessionKey, StoredRecord]]:
    """Return all records of a store in the order they were written."""
    found = [
        (summary.key, stored)
        for summary in await store.sessions()
        for stored in await store.read(summary.key)
    ]
    return sorted(found, key=lambda one: (one[1].at, one[1].offset))


async def store_with(written: list[tuple[SessionKey, StoredRecord]]) -> MemoryStore:
    """Return a store with these records and no writer, as after a crash."""
    store = MemoryStore()
    for key, stored in written:
        writer = await store.open(key)
        await writer.append([stored.record])
        await writer.release()
    return store


async def recover(store: MemoryStore, agent: Agent) -> AsyncIterator[Session]:
    """Open the session, and wait for the end of resumed work."""
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        while (running := session.running) is not None:
            async with asyncio.timeout(10):
                await running.wait()
                await wait_until(lambda: session.running is not running)
        yield session


def assert_one_outcome_each(found: list[Record]) -> None:
    accepted = [one.work_id for one in found if isinstance(one, WorkAccepted)]
    ended = [one.work_id for one in found if isinstance(one, WorkEnded)]
    assert sorted(accepted) == sorted(ended)


@pytest.mark.parametrize("durable", [False, True])
async def test_work_killed_after_any_record_ends_once_without_repeating_tools(
    durable: bool,
) -> None:
    counter = Counter(durable=durable)
    store = MemoryStore()
    async with init(agent_of(counter), id="x", store=store) as harness:
        await (await harness.session()).prompt("count twice")
    written = await all_records(store)
    for cut in range(1, len(written) + 1):
        again = Counter(durable=durable)
        async for session in recover(await store_with(written[:cut]), agent_of(again)):
            found = await records(session)
            assert_one_outcome_each(found)
            started = [one.call_id for one in found if isinstance(one, ToolStarted)]
            before = [
                stored.record.call_id
                for _, stored in written[:cut]
                if isinstance(stored.record, ToolStarted)
            ]
            if not durable:
                # Tools that had started before the crash did not run again.
                assert len(again.keys) == len(started) - len(before)
                assert len(set(started)) == len(started)
            await session.prompt("and now?")
            assert_one_outcome_each(await records(session))


async def test_interrupted_tool_has_an_unknown_result() -> None:
    counter = Counter()
    store = MemoryStore()
    async with init(agent_of(counter), id="x", store=store) as harness:
        await (await harness.session()).prompt("count twice")
    written = await all_records(store)
    at = next(n for n, (_, one) in enumerate(written) if isinstance(one.record, ToolStarted))
    again = Counter()
    agent = agent_of(again)
    async for session in recover(await store_with(written[: at + 1]), agent):
        (unknown, _) = await records_of(session, ToolEnded)
        assert unknown.status == "unknown"
        assert len(again.keys) == 1
        assert "not known" in str(await session.messages())


async def test_durable_tool_runs_again_with_the_same_key() -> None:
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
    written = await all_records(store)
    at = next(n for n, (_, one) in enumerate(written) if isinstance(one.record, ToolStarted))
    async for session in recover(await store_with(written[: at + 1]), agent):
        assert seen == [(seen[0][0], 1), (seen[0][0], 2)]
        assert [one.outcome for one in await records_of(session, WorkEnded)] == ["completed"]


async def test_resumed_operation_can_be_awaited() -> None:
    store = await store_with_unanswered_prompts("x")
    agent = agent_of(Counter(), answer="here it is")
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        assert (await session.running).text == "here it is"


async def store_with_unanswered_prompts(*keys: str, **accepted: Any) -> MemoryStore:
    """Return a store whose session has prompts without a reply."""
    from smokebox.agents.log.store import SessionKey

    store = MemoryStore()
    writer = await store.open(SessionKey("agent", "x", "default"))
    message = UserMessage((Text("Where is it?"),))
    await writer.append([SessionCreated("system")])
    for work in keys:
        await writer.append([WorkAccepted(work, "prompt", message, **accepted)])
    await writer.append([WorkStarted(keys[0]), MessageAdded(keys[0], message)])
    await writer.release()
    return store


async def test_queued_work_resumes_in_order() -> None:
    store = await store_with_unanswered_prompts("one", "two")
    async for session in recover(store, agent_of(Counter(), answer="answer")):
        assert [end.work_id for end in await records_of(session, WorkEnded)] == ["one", "two"]


async def test_new_prompt_runs_after_resumed_work() -> None:
    store = await store_with_unanswered_prompts("one")
    model = ScriptedModel(then=lambda request: f"re: {last_text(request)}")
    agent = create_agent(model=model, sandbox=None, durability=QUICK)
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert (await session.prompt("new", when_busy="queue")).text == "re: new"
        assert [end.text for end in await records_of(session, WorkEnded)] == [
            "re: Where is it?",
            "re: new",
        ]


async def test_open_session_resumes_work_of_another_process() -> None:
    store = MemoryStore()
    model = ScriptedModel(then=lambda request: f"re: {last_text(request)}")
    agent = create_agent(model=model, sandbox=None, durability=QUICK)
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        writer = await store.open(session.key)
        message = UserMessage((Text("left"),))
        await writer.append([WorkAccepted("one", "prompt", message), WorkStarted("one")])
        await writer.append([MessageAdded("one", message)])
        await writer.release()
        assert (await session.prompt("new")).text == "re: new"
        assert (await records_of(session, WorkEnded))[0].work_id == "one"


async def test_aborted_work_stays_aborted() -> None:
    store = await store_with_unanswered_prompts("one")
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
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["aborted"]


async def test_work_is_started_at_most_max_attempts_times() -> None:
    store = await store_with_unanswered_prompts("one")
    agent = agent_of(Counter(), answer="x", durability=Durability(max_attempts=1))
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        with pytest.raises(LimitReached, match="started 1 times"):
            await session.running


async def test_resumed_work_past_its_timeout_fails() -> None:
    store = await store_with_unanswered_prompts("one", options={"timeout": 0.001})
    accepted = time.time()
    await wait_until(lambda: time.time() > accepted + 0.001)
    agent = agent_of(Counter(), answer="x")
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        with pytest.raises(DeadlineExceeded):
            await session.running


async def test_result_of_resumed_work_is_decoded_json() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    store = await store_with_unanswered_prompts("one", options={"result": schema})
    agent = agent_of(Counter(), answer=call("finish", n=3))
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        assert session.running is not None
        assert (await session.running).data == {"n": 3}


async def test_result_is_collected_once_after_a_crash_at_any_record() -> None:
    model_turns = [call("count"), call("finish", result=5)]

    def answer(request: ModelRequest) -> Any:
        return model_turns[min(1, sum(isinstance(m, ToolReturns) for m in request.messages))]

    store = MemoryStore()
    async with init(agent_of(Counter(), answer), id="x", store=store) as harness:
        assert (await (await harness.session()).prompt("go", result=int)).data == 5
    written = await all_records(store)
    for cut in range(1, len(written) + 1):
        async for session in recover(await store_with(written[:cut]), agent_of(Counter(), answer)):
            found = await records(session)
            assert_one_outcome_each(found)
            ends = [one for one in found if isinstance(one, WorkEnded)]
            assert all(one.outcome == "completed" for one in ends)


async def test_pending_approval_survives_a_crash() -> None:
    def answer(request: ModelRequest) -> Any:
        return "done" if last_returns(request) else call("count")

    store = MemoryStore()
    counter = Counter()
    policy = {"ask": ["count"]}
    agent = agent_of(counter, answer, approval=policy)
    async with init(agent, id="x", store=store) as harness:
        session = await harness.session()
        operation = session.prompt("go")
        await first_event(operation, ApprovalNeeded)
        written = await all_records(store)
        await operation.abort()
    again = await store_with(written)
    async with init(agent, id="x", store=again) as harness:
        session = await harness.session()
        running = session.running
        assert running is not None
        needed = await first_event(running, ApprovalNeeded)
        await wait_until(lambda: session.approvals)
        assert counter.keys == []
        await session.approve(needed.call_id)
        assert (await running).text == "done"
        assert counter.keys == ["ran"]


async def test_tasks_resume_after_a_crash_at_any_record() -> None:
    def answer(request: ModelRequest) -> Any:
        if back := last_returns(request):
            return f"got: {back[0].text}"
        return "did it" if last_text(request) == "child" else call("task", prompt="child")

    def agent() -> Agent:
        return create_agent(
            model=ScriptedModel(then=answer), sandbox=virtual, durability=QUICK, name="agent"
        )

    store = MemoryStore()
    async with init(agent(), id="x", store=store) as harness:
        await (await harness.session()).prompt("go")
    written = await all_records(store)
    for cut in range(2, len(written) + 1):
        again = await store_with(written[:cut])
        async for session in recover(again, agent()):
            for summary in await again.sessions():
                found = [one.record for one in await again.read(summary.key)]
                assert_one_outcome_each(found)
            ends = await records_of(session, WorkEnded)
            assert all(end.text in ("got: did it",) for end in ends), cut
            children = [one for one in await again.sessions() if one.parent]
            assert len(children) <= 1


async def test_session_task_resumes_after_a_crash() -> None:
    agent = create_agent(model=ScriptedModel(then="did it"), sandbox=virtual, durability=QUICK)
    store = MemoryStore()
    async with init(agent, id="x", store=store) as harness:
        await (await harness.session()).task("child")
    written = await all_records(store)
    for cut in range(2, len(written) + 1):
        async for session in recover(await store_with(written[:cut]), agent):
            found = await records(session)
            assert_one_outcome_each(found)
            assert all(one.text == "did it" for one in found if isinstance(one, WorkEnded))


async def test_interrupted_shell_command_is_not_run_again() -> None:
    agent = create_agent(model=ScriptedModel(then="ok"), sandbox=virtual, durability=QUICK)
    store = MemoryStore()
    async with init(agent, id="x", store=store) as harness:
        await (await harness.session()).shell("echo hi >> log")
    written = [one for one in await all_records(store) if not isinstance(one[1].record, WorkEnded)]
    again = await store_with(written[:3])
    async with init(agent, id="x", store=again) as harness:
        session = await harness.session()
        assert session.running is not None
        with pytest.raises(SmokeboxError, match="not known"):
            await session.running
        assert not await harness.fs.exists("log")
        assert "not known whether it ran" in str(await session.messages())


async def test_compaction_resumes_after_a_crash_at_any_record() -> None:
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
    written = await all_records(store)
    for cut in range(1, len(written) + 1):
        async for session in recover(await store_with(written[:cut]), agent):
            assert_one_outcome_each(await records(session))
            assert (await session.prompt("go on")).text == "ok"


async def test_work_resumes_after_the_event_loop_ended() -> None:
    store = MemoryStore()
    agent = create_agent(model=ScriptedModel(Turn("x", hang=True)), sandbox=None)

    async def program() -> None:
        harness = await init(agent, id="x", store=store)
        session = await harness.session()
        session.prompt("go")
        await wait_until(lambda: event_log(session).conversation.unfinished)

    await asyncio.to_thread(asyncio.run, program())
    (summary,) = await store.sessions()
    assert summary.unfinished == 1
    later = create_agent(model=ScriptedModel(then="here"), sandbox=None, durability=QUICK)
    async for session in recover(store, later):
        assert [end.text for end in await records_of(session, WorkEnded)] == ["here"]
