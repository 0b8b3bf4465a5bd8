"""Tests of the loop: turns, tools, retries, compaction, abort and results."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from agents.scripted_session import (
    event_log,
    first_event,
    record_names,
    records,
    records_of,
    scripted_session,
    wait_until,
)
from smokebox import Budget, Durability, tool
from smokebox.agents.events import (
    Fallback,
    OperationEnd,
    Retry,
    TextEvent,
    ThinkingEvent,
    ToolEnd,
    ToolOutput,
    ToolStart,
    TurnStart,
    UsageEvent,
)
from smokebox.agents.log.records import ReplyDelta, ReplyFailed, ToolEnded, ToolStarted, WorkEnded
from smokebox.agents.messages import ToolCall, ToolReturns, UserMessage
from smokebox.agents.model import ModelInfo
from smokebox.agents.tools import ToolImage, ToolResult
from smokebox.errors import (
    Aborted,
    ContextOverflow,
    DeadlineExceeded,
    InvalidOption,
    ModelRefused,
    ModelUnavailable,
    ResultUnavailable,
)
from smokebox.testing import ScriptedModel, Turn, call, last_returns, last_text, think

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def forever() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return ""


async def test_reply_is_streamed() -> None:
    async with scripted_session(["So.", think("hm")]) as session:
        operation = session.prompt("Hello")
        events = [event async for event in operation]
        reply = await operation
    assert str(reply) == reply.text == "So."
    assert reply.model == "scripted/model"
    assert reply.usage.requests == 1
    assert [type(event) for event in events] == [
        TurnStart,
        TextEvent,
        ThinkingEvent,
        UsageEvent,
        OperationEnd,
    ]


async def test_turn_with_a_tool_takes_four_commits() -> None:
    async with scripted_session(call("add", a=1, b=2), "3", tools=[add]) as session:
        commits = _count_commits(session)
        assert (await session.prompt("1 + 2")).text == "3"
        assert [len(batch) for batch in commits] == [3, 3, 1, 3]
        assert (await record_names(session))[1:] == [
            "WorkAccepted",
            "WorkStarted",
            "MessageAdded",
            "ReplyStarted",
            "ReplyEnded",
            "ToolStarted",
            "ToolEnded",
            "ReplyStarted",
            "ReplyEnded",
            "WorkEnded",
        ]


def _count_commits(session: Any) -> list[Any]:
    commits: list[Any] = []
    commit = event_log(session)._commit

    async def counted(batch: Any) -> None:
        commits.append(batch)
        await commit(batch)

    event_log(session)._commit = counted  # type: ignore[method-assign]
    return commits


async def test_model_gets_the_tool_result() -> None:
    model = ScriptedModel(call("add", a=1, b=2), lambda request: last_returns(request)[0].text)
    async with scripted_session(model=model, tools=[add]) as session:
        assert (await session.prompt("1 + 2")).text == "3"
    assert [spec.name for spec in model.requests[0].tools] == ["add"]


async def test_tools_run_concurrently_and_return_in_order() -> None:
    meeting = asyncio.Barrier(2)

    @tool
    async def meet(name: str) -> str:
        """Wait for the other."""
        await asyncio.wait_for(meeting.wait(), 10)
        return name

    model = ScriptedModel([call("meet", name="a"), call("meet", name="b")], "done")
    async with scripted_session(model=model, tools=[meet]) as session:
        await session.prompt("go")
        last = model.requests[1].messages[-1]
        assert isinstance(last, ToolReturns)
        assert [back.text for back in last.returns] == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (call("ad", a=1, b=2), "Did you mean 'add'?"),
        (ToolCall("x", "add", "{not json"), "not JSON"),
        (ToolCall("x", "add", "[1]"), "must be a JSON object"),
        (call("add", a="one", b=2), "a"),
        (call("add", a=1), "b"),
    ],
)
async def test_invalid_call_returns_an_error_to_the_model(wrong: ToolCall, expected: str) -> None:
    model = ScriptedModel(wrong, "sorry")
    async with scripted_session(model=model, tools=[add]) as session:
        assert (await session.prompt("1 + 2")).text == "sorry"
        (back,) = last_returns(model.requests[1])
        assert back.is_error
        assert expected in back.text


async def test_exception_of_a_tool_becomes_its_result() -> None:
    @tool
    def broken() -> str:
        """Raise an error."""
        raise ValueError("it is broken")

    model = ScriptedModel(call("broken"), "sorry")
    async with scripted_session(model=model, tools=[broken]) as session:
        await session.prompt("go")
        (back,) = last_returns(model.requests[1])
        assert "ValueError: it is broken" in back.text
        assert [one.status for one in await records_of(session, ToolEnded)] == ["error"]


async def test_tool_timeout_becomes_its_result() -> None:
    slow = tool(timeout=0.01)(forever.wrapped)
    model = ScriptedModel(call("forever"), "too slow")
    async with scripted_session(model=model, tools=[slow]) as session:
        assert (await session.prompt("go")).text == "too slow"
        assert [one.status for one in await records_of(session, ToolEnded)] == ["timeout"]


async def test_calls_with_the_same_id_get_unique_ids() -> None:
    twice = [ToolCall("same", "add", '{"a":1,"b":1}'), ToolCall("same", "add", '{"a":2,"b":2}')]
    model = ScriptedModel(Turn(twice), "done")
    async with scripted_session(model=model, tools=[add]) as session:
        await session.prompt("go")
        assert [back.text for back in last_returns(model.requests[1])] == ["2", "4"]
        assert len({back.call_id for back in last_returns(model.requests[1])}) == 2


async def test_output_of_a_command_is_an_event() -> None:
    from smokebox import virtual

    async with scripted_session(call("bash", command="echo hi"), "ok", sandbox=virtual) as session:
        operation = session.prompt("go")
        events = [event async for event in operation]
    assert [event.chunk.data for event in events if isinstance(event, ToolOutput)] == ["hi\n"]
    (end,) = (event for event in events if isinstance(event, ToolEnd))
    assert (end.name, end.status, end.text) == ("bash", "ok", "hi")


async def test_image_of_a_tool_is_stored_as_a_blob() -> None:
    @tool
    def picture() -> ToolResult:
        """Return an image."""
        return ToolResult(text="see", images=(ToolImage(media_type="image/png", data=PNG),))

    model = ScriptedModel(call("picture"), "nice")
    async with scripted_session(model=model, tools=[picture]) as session:
        await session.prompt("go")
        (back,) = last_returns(model.requests[1])
        load = model.requests[1].load
        assert load is not None
        assert await load(back.images[0]) == PNG


async def test_temporary_model_error_is_retried() -> None:
    busy = ModelUnavailable("busy", model="scripted/model", retry_after=0.001)
    async with scripted_session(busy, busy, "here") as session:
        operation = session.prompt("go")
        events = [event async for event in operation]
        assert (await operation).text == "here"
        assert [event.delay for event in events if isinstance(event, Retry)] == [0.001, 0.001]
        assert len(await records_of(session, ReplyFailed)) == 2


async def test_work_fails_after_the_last_retry() -> None:
    busy = ModelUnavailable("busy", model="scripted/model", retry_after=None)
    model = ScriptedModel(then=busy)
    async with scripted_session(model=model) as session:
        with pytest.raises(ModelUnavailable, match="busy"):
            await session.prompt("go")
        assert len(model.requests) == 4
        (end,) = await records_of(session, WorkEnded)
        assert end.outcome == "failed"
        assert end.error is not None
        assert end.error["code"] == "model_unavailable"


async def test_too_long_retry_after_fails_at_once() -> None:
    model = ScriptedModel(ModelUnavailable("limited", model="m", retry_after=3600.0))
    async with scripted_session(model=model) as session:
        with pytest.raises(ModelUnavailable):
            await session.prompt("go")


async def test_fallback_model_takes_over() -> None:
    broken = ScriptedModel(ModelRefused("no such model", model="a/b"), name="a/b")
    backup = ScriptedModel(call("add", a=1, b=1), "2", name="c/d")
    async with scripted_session(model=[broken, backup], tools=[add]) as session:
        operation = session.prompt("1 + 1")
        events = [event async for event in operation]
        reply = await operation
    assert (reply.text, reply.model) == ("2", "c/d")
    assert [event.model for event in events if isinstance(event, Fallback)] == ["c/d"]
    assert len(broken.requests) == 1


async def test_stalled_stream_is_retried() -> None:
    async with scripted_session(
        Turn("beginning", hang=True), "whole", durability=Durability(stall=0.05, retry_delay=0.001)
    ) as session:
        operation = session.prompt("go")
        retry = await first_event(operation, Retry)
        assert "sent nothing for" in retry.error
        assert (await operation).text == "whole"


async def test_truncated_stream_is_retried() -> None:
    class TruncatedModel(ScriptedModel):
        async def stream(self, request: Any) -> Any:
            async for item in super().stream(request):
                if len(self.requests) == 1 and not isinstance(item, TextEvent):
                    return
                yield item

    async with scripted_session(model=TruncatedModel("gone", "here")) as session:
        assert (await session.prompt("go")).text == "here"


async def test_long_reply_is_recorded_in_few_deltas() -> None:
    long = "word " * 4000
    async with scripted_session(Turn(long)) as session:
        assert (await session.prompt("go")).text == long
        deltas = await records_of(session, ReplyDelta)
        assert 3 <= len(deltas) <= 6
        assert long.startswith("".join(delta.text for delta in deltas))


async def test_context_overflow_compacts_and_retries() -> None:
    too_long = ContextOverflow("too long", model="scripted/model")
    model = ScriptedModel("one", "two", too_long, "## Goal\nThe summary.", "after")
    async with scripted_session(model=model, compaction={"keep_recent": 0}) as session:
        await session.prompt("first")
        await session.prompt("second")
        assert (await session.prompt("third")).text == "after"
        assert "Compacted" in await record_names(session)
        begin = model.requests[-1].messages[0]
        assert isinstance(begin, UserMessage)
        assert "The summary." in str(begin)


async def test_second_overflow_in_a_turn_fails() -> None:
    too_long = ContextOverflow("too long", model="scripted/model")
    model = ScriptedModel("one", too_long, "summary", too_long)
    async with scripted_session(model=model, compaction={"keep_recent": 0}) as session:
        await session.prompt("first")
        with pytest.raises(ContextOverflow):
            await session.prompt("second")


async def test_conversation_is_compacted_before_it_overflows() -> None:
    info = ModelInfo(context_window=3000, max_output=500)
    model = ScriptedModel(
        "x" * 12000,
        then=lambda request: "Short." if "summarize" in request.system else "fine",
        info=info,
    )
    async with scripted_session(model=model, compaction={"keep_recent": 10}) as session:
        await session.prompt("first")
        assert (await session.prompt("second")).text == "fine"
        assert "Compacted" in await record_names(session)


async def test_abort_stops_the_stream() -> None:
    async with scripted_session(Turn("beginning", hang=True), "fresh") as session:
        operation = session.prompt("go")
        await first_event(operation, TextEvent)
        await operation.abort("enough")
        with pytest.raises(Aborted, match="enough"):
            await operation
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["aborted"]
        assert "AbortRequested" in await record_names(session)
        assert (await session.prompt("again")).text == "fresh"


async def test_abort_stops_tools_and_the_next_turn_shows_it() -> None:
    model = ScriptedModel([call("forever"), call("add", a=1, b=2)], "I see")
    async with scripted_session(model=model, tools=[forever, add]) as session:
        operation = session.prompt("go")
        await first_event(operation, ToolEnd)
        await operation.abort()
        with pytest.raises(Aborted):
            await operation
        statuses = {one.call_id: one.status for one in await records_of(session, ToolEnded)}
        assert sorted(statuses.values()) == ["aborted", "ok"]
        await session.prompt("What happened?")
        messages = str(model.requests[1].messages)
        assert "stopped before it ended" in messages
        assert "aborted" in messages


async def test_cancelled_await_aborts_the_work() -> None:
    async with scripted_session(Turn("beginning", hang=True)) as session:
        operation = session.prompt("go")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await operation
        assert operation.done
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["aborted"]


async def test_operation_without_reference_continues() -> None:
    async with scripted_session("done") as session:
        session.prompt("go")
        await wait_until(lambda: session.running is None)
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["completed"]


async def test_abort_after_the_end_changes_nothing() -> None:
    async with scripted_session("done") as session:
        operation = session.prompt("go")
        await operation
        await operation.abort()
        assert (await operation).text == "done"


async def test_several_readers_see_all_events() -> None:
    async with scripted_session("a longer answer than one piece") as session:
        operation = session.prompt("go")
        one, two = [[event async for event in operation] for _ in range(2)]
        assert one == two
        assert isinstance(one[-1], OperationEnd)


async def test_prompt_timeout_fails() -> None:
    async with scripted_session(Turn(hang=True)) as session:
        with pytest.raises(DeadlineExceeded):
            await session.prompt("go", timeout=0.02)
        assert [end.outcome for end in await records_of(session, WorkEnded)] == ["failed"]


async def test_reply_names_truncation_and_refusal() -> None:
    async with scripted_session(Turn("half", stop="length"), Turn("no", stop="refused")) as session:
        assert (await session.prompt("go")).stopped == "length"
        assert (await session.prompt("go")).stopped == "refused"


async def test_prompt_without_a_model_is_refused() -> None:
    async with scripted_session(model=ScriptedModel("hi")) as session:
        object.__setattr__(session._context.setup.options, "model", ())
        with pytest.raises(InvalidOption, match="no model"):
            await session.prompt("go")
        assert (await session.prompt("go", model=ScriptedModel("other"))).text == "other"


@dataclass
class Point:
    x: int
    y: int


async def test_finish_tool_returns_a_typed_result() -> None:
    model = ScriptedModel(call("finish", x=1), call("finish", x=1, y=2))
    async with scripted_session(model=model) as session:
        reply = await session.prompt("Where?", result=Point)
        assert reply.data == Point(1, 2)
        (end,) = await records_of(session, WorkEnded)
        assert end.result == {"x": 1, "y": 2}
    assert "y" in last_returns(model.requests[1])[0].text
    assert [spec.name for spec in model.requests[0].tools] == ["finish", "give_up"]


async def test_native_result_is_the_reply() -> None:
    info = ModelInfo(native_results=True)
    model = ScriptedModel('{"x": 1}', '{"x": 1, "y": 2}', info=info)
    async with scripted_session(model=model) as session:
        assert (await session.prompt("Where?", result=Point)).data == Point(1, 2)
    assert model.requests[0].result is not None
    assert not model.requests[0].tools
    assert "y" in last_text(model.requests[1])


async def test_missing_result_is_reminded_three_times() -> None:
    model = ScriptedModel(then="I would rather talk.")
    async with scripted_session(model=model) as session:
        with pytest.raises(ResultUnavailable) as caught:
            await session.prompt("Where?", result=Point)
    assert len(model.requests) == 4
    assert caught.value.text == "I would rather talk."
    assert "finish" in last_text(model.requests[1])


async def test_give_up_raises_with_its_reason() -> None:
    async with scripted_session(["Hm.", call("give_up", reason="not documented")]) as session:
        with pytest.raises(ResultUnavailable) as caught:
            await session.prompt("Where?", result=Point)
    assert (caught.value.reason, caught.value.text) == ("not documented", "Hm.")


async def test_tools_of_a_prompt_are_added() -> None:
    model = ScriptedModel(call("add", a=1, b=1), "2", "none")
    async with scripted_session(model=model, tools=[forever]) as session:
        await session.prompt("1 + 1", tools=[add])
        await session.prompt("again")
    assert [[spec.name for spec in request.tools] for request in model.requests] == [
        ["forever", "add"],
        ["forever", "add"],
        ["forever"],
    ]


async def test_messages_only_grow_at_the_end() -> None:
    model = ScriptedModel(call("add", a=1, b=1), "2", call("add", a=2, b=2), "4")
    async with scripted_session(model=model, tools=[add]) as session:
        await session.prompt("1 + 1")
        await session.prompt("2 + 2")
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages
        assert (after.system, list(after.tools)) == (before.system, list(before.tools))


async def test_images_of_a_prompt_are_stored_as_blobs() -> None:
    model = ScriptedModel("a picture")
    async with scripted_session(model=model) as session:
        await session.prompt("What is this?", images=[PNG])
        message = model.requests[0].messages[-1]
        assert isinstance(message, UserMessage)
        load = model.requests[0].load
        assert load is not None
        assert await load(message.parts[1]) == PNG  # type: ignore[arg-type]


@pytest.mark.parametrize("image", [b"\x89PNG\r\n\x1a\n" + bytes(6_000_000), b"text", 5])
async def test_unsupported_image_is_refused(image: Any) -> None:
    async with scripted_session() as session:
        with pytest.raises(InvalidOption, match="image"):
            session.prompt("What is this?", images=[image])
        assert await record_names(session) == ["SessionCreated"]


async def test_tool_start_is_recorded_before_it_runs() -> None:
    seen: list[list[str]] = []

    @tool
    async def look() -> str:
        """Read the event log."""
        seen.append(await record_names(session))
        return "seen"

    async with scripted_session(call("look"), "ok", tools=[look]) as session:
        await session.prompt("go")
        assert seen[0][-1] == "ToolStarted"
        (started,) = await records_of(session, ToolStarted)
        assert started.name == "look"


async def test_many_turns_stay_in_the_budget() -> None:
    model = ScriptedModel(then=call("add", a=1, b=1))
    async with scripted_session(model=model, tools=[add], compaction=False) as session:
        reply = await session.prompt("go on", budget=Budget(turns=60))
        assert reply.stopped == "budget: turns"
        assert len(model.requests) == 60
        assert len(await records(session)) == 1 + 3 + 60 * 4 + 1


async def test_tool_start_event_has_the_arguments() -> None:
    async with scripted_session(call("add", a=1, b=2), "3", tools=[add]) as session:
        started = await first_event(session.prompt("go"), ToolStart)
        assert (started.name, started.arguments) == ("add", {"a": 1, "b": 2})
        await wait_until(lambda: session.running is None)
