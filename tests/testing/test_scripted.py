"""ScriptedModel: turns in order, requests recorded."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.messages import (
    AssistantMessage,
    Message,
    Text,
    Thinking,
    ToolReturn,
    ToolReturns,
    Usage,
    UserMessage,
)
from smokebox.agents.model import CallDelta, ModelInfo, ModelRequest, TextDelta, ThinkingDelta
from smokebox.errors import InvalidOption, ModelRefused, ModelUnavailable
from smokebox.testing import (
    ScriptedModel,
    ScriptExhausted,
    Turn,
    call,
    last_returns,
    last_text,
    think,
)

if TYPE_CHECKING:
    from smokebox.agents.model import Delta, Model


def request(*messages: Message, system: str = "Be brief.") -> ModelRequest:
    return ModelRequest(system=system, messages=messages or (user("hello"),))


def user(text: str) -> UserMessage:
    return UserMessage(parts=(Text(text),))


async def run(
    model: Model, model_request: ModelRequest | None = None
) -> tuple[list[Delta], AssistantMessage]:
    items = [item async for item in model.stream(model_request or request())]
    deltas = [item for item in items if not isinstance(item, AssistantMessage)]
    last = items[-1]
    assert isinstance(last, AssistantMessage)
    return deltas, last


async def test_turns_are_returned_in_order() -> None:
    model = ScriptedModel("one", "two")
    assert [(await run(model))[1].text for _ in range(2)] == ["one", "two"]
    model.assert_finished()


async def test_text_is_streamed_in_chunks() -> None:
    deltas, message = await run(ScriptedModel("abcdefg", chunk=3))
    assert deltas == [TextDelta("abc"), TextDelta("def"), TextDelta("g")]
    assert message.text == "abcdefg"
    assert message.stop == "end"


async def test_tool_call_has_json_arguments_and_an_id() -> None:
    deltas, message = await run(ScriptedModel(call("bash", command="ls", timeout=3)))
    (tool_call,) = message.calls
    assert deltas == [CallDelta("bash")]
    assert json.loads(tool_call.arguments) == {"command": "ls", "timeout": 3}
    assert tool_call.id
    assert message.stop == "tool_calls"


async def test_tool_call_ids_are_unique() -> None:
    model = ScriptedModel([call("a"), call("b")], [call("a"), call("b")])
    messages = [(await run(model))[1] for _ in range(2)]
    assert len({one.id for message in messages for one in message.calls}) == 4


async def test_turn_may_mix_thinking_text_and_calls() -> None:
    deltas, message = await run(ScriptedModel([think("hm", "sig"), "Look:", call("ls")]))
    assert deltas == [ThinkingDelta("hm"), TextDelta("Look:"), CallDelta("ls")]
    assert message.parts[:2] == (Thinking("hm", "sig"), Text("Look:"))


async def test_invalid_arguments_are_kept() -> None:
    broken = call("bash")
    broken = type(broken)(id="x", name="bash", arguments='{"command": "ls')
    _, message = await run(ScriptedModel(broken))
    assert message.calls == (broken,)


async def test_exception_is_raised() -> None:
    with pytest.raises(ModelUnavailable):
        await run(ScriptedModel(ModelUnavailable("overloaded", model="m", status=529)))


async def test_error_may_follow_partial_text() -> None:
    model = ScriptedModel(Turn("half", error=ModelUnavailable("cut off", model="m")))
    received: list[object] = []
    with pytest.raises(ModelUnavailable):
        async for item in model.stream(request()):
            received.append(item)  # noqa: PERF401
    assert received == [TextDelta("half")]


async def test_hanging_turn_sends_its_text_and_can_be_cancelled() -> None:
    received: list[object] = []

    async def read() -> None:
        async for item in ScriptedModel(Turn("half", hang=True)).stream(request()):
            received.append(item)  # noqa: PERF401

    task = asyncio.create_task(read())
    async with asyncio.timeout(10):
        while not received:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert received == [TextDelta("half")]


async def test_function_returns_the_turn() -> None:
    model = ScriptedModel(lambda request: last_text(request).upper())
    assert (await run(model))[1].text == "HELLO"


async def test_function_may_be_async() -> None:
    event = asyncio.Event()

    async def turn(_: ModelRequest) -> str:
        await event.wait()
        return "done"

    task = asyncio.create_task(run(ScriptedModel(turn)))
    await asyncio.sleep(0)
    assert not task.done()
    event.set()
    assert (await task)[1].text == "done"


async def test_then_is_used_for_all_further_requests() -> None:
    model = ScriptedModel("first", then="again")
    assert [(await run(model))[1].text for _ in range(3)] == ["first", "again", "again"]


async def test_request_after_the_last_turn_raises() -> None:
    model = ScriptedModel("only")
    await run(model)
    with pytest.raises(ScriptExhausted, match="has 1 turns, but turn 2 was requested") as caught:
        await run(model, request(user("and now?")))
    assert "and now?" in str(caught.value)
    assert isinstance(caught.value, ModelRefused)


async def test_assert_finished_fails_for_unused_turns() -> None:
    model = ScriptedModel("one", "two")
    await run(model)
    assert model.remaining == 1
    with pytest.raises(
        AssertionError, match="1 of 2 turns of scripted/model were requested; the next is 'two'"
    ):
        model.assert_finished()


async def test_requests_are_recorded_as_they_were() -> None:
    messages: list[Message] = [user("hello")]
    model = ScriptedModel(then="yes")
    await run(model, ModelRequest(system="S", messages=messages))
    messages.append(user("more"))
    await run(model, ModelRequest(system="S", messages=messages))
    assert [len(one.messages) for one in model.requests] == [1, 2]


async def test_usage_counts_input_output_and_cached_tokens() -> None:
    messages: list[Message] = [user("x" * 400)]
    model = ScriptedModel(then="y" * 40)
    _, first = await run(model, ModelRequest(system="S" * 40, messages=messages))
    messages += [first, user("z" * 40)]
    _, second = await run(model, ModelRequest(system="S" * 40, messages=messages))
    assert first.usage == Usage(requests=1, input_tokens=110, output_tokens=10)
    assert second.usage == Usage(
        requests=1, input_tokens=130, output_tokens=10, cache_read_tokens=110
    )


async def test_usage_and_stop_can_be_set() -> None:
    usage = Usage(requests=1, input_tokens=5, cost=1.5)
    _, message = await run(ScriptedModel(Turn("cut", usage=usage, stop="length")))
    assert (message.usage, message.stop) == (usage, "length")


async def test_last_returns_and_last_text() -> None:
    result = ToolReturn(call_id="1", name="bash", text="a.txt")
    last = request(user("look"), ToolReturns((result,)))
    assert last_returns(last) == (result,)
    assert last_text(last) == "a.txt"
    assert last_returns(request()) == ()


async def test_name_and_info_are_settable() -> None:
    model = ScriptedModel(name="scripted/small", info=ModelInfo(context_window=1000))
    assert (model.name, model.info.context_window) == ("scripted/small", 1000)
    await model.aclose()
    assert model.closed


async def test_invalid_part_is_refused() -> None:
    with pytest.raises(InvalidOption, match="cannot contain 7"):
        await run(ScriptedModel([7]))  # type: ignore[list-item]
