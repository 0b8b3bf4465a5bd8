"""A scripted model says what is written, and remembers what it was sent."""

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
    return ModelRequest(system=system, messages=messages or (said("hello"),))


def said(text: str) -> UserMessage:
    return UserMessage(parts=(Text(text),))


async def answer(
    model: Model, asked: ModelRequest | None = None
) -> tuple[list[Delta], AssistantMessage]:
    items = [item async for item in model.stream(asked or request())]
    deltas = [item for item in items if not isinstance(item, AssistantMessage)]
    last = items[-1]
    assert isinstance(last, AssistantMessage)
    return deltas, last


async def test_turns_are_said_in_order() -> None:
    model = ScriptedModel("one", "two")
    assert [(await answer(model))[1].text for _ in range(2)] == ["one", "two"]
    model.assert_finished()


async def test_text_comes_in_pieces_that_make_the_whole() -> None:
    deltas, message = await answer(ScriptedModel("abcdefg", chunk=3))
    assert deltas == [TextDelta("abc"), TextDelta("def"), TextDelta("g")]
    assert message.text == "abcdefg"
    assert message.stop == "end"


async def test_a_tool_call_has_its_arguments_as_json_and_an_id() -> None:
    deltas, message = await answer(ScriptedModel(call("bash", command="ls", timeout=3)))
    (made,) = message.calls
    assert deltas == [CallDelta("bash")]
    assert json.loads(made.arguments) == {"command": "ls", "timeout": 3}
    assert made.id
    assert message.stop == "tool_calls"


async def test_ids_of_calls_differ_in_and_between_turns() -> None:
    model = ScriptedModel([call("a"), call("b")], [call("a"), call("b")])
    messages = [(await answer(model))[1] for _ in range(2)]
    assert len({made.id for message in messages for made in message.calls}) == 4


async def test_a_list_mixes_thoughts_words_and_calls() -> None:
    deltas, message = await answer(ScriptedModel([think("hm", "sig"), "Look:", call("ls")]))
    assert deltas == [ThinkingDelta("hm"), TextDelta("Look:"), CallDelta("ls")]
    assert message.parts[:2] == (Thinking("hm", "sig"), Text("Look:"))


async def test_arguments_that_are_not_json_are_said_as_they_are() -> None:
    broken = call("bash")
    broken = type(broken)(id="x", name="bash", arguments='{"command": "ls')
    _, message = await answer(ScriptedModel(broken))
    assert message.calls == (broken,)


async def test_an_exception_is_raised() -> None:
    with pytest.raises(ModelUnavailable):
        await answer(ScriptedModel(ModelUnavailable("overloaded", model="m", status=529)))


async def test_an_error_may_come_after_half_an_answer() -> None:
    model = ScriptedModel(Turn("half", error=ModelUnavailable("cut off", model="m")))
    heard: list[object] = []
    with pytest.raises(ModelUnavailable):
        async for item in model.stream(request()):
            heard.append(item)  # noqa: PERF401
    assert heard == [TextDelta("half")]


async def test_a_turn_that_hangs_says_what_it_has_and_can_be_cancelled() -> None:
    heard: list[object] = []

    async def listen() -> None:
        async for item in ScriptedModel(Turn("half", hang=True)).stream(request()):
            heard.append(item)  # noqa: PERF401

    task = asyncio.create_task(listen())
    async with asyncio.timeout(10):
        while not heard:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == [TextDelta("half")]


async def test_a_function_makes_a_turn_of_the_request() -> None:
    model = ScriptedModel(lambda asked: last_text(asked).upper())
    assert (await answer(model))[1].text == "HELLO"


async def test_a_function_may_wait() -> None:
    gate = asyncio.Event()

    async def turn(_: ModelRequest) -> str:
        await gate.wait()
        return "open"

    task = asyncio.create_task(answer(ScriptedModel(turn)))
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    assert (await task)[1].text == "open"


async def test_then_answers_all_further_requests() -> None:
    model = ScriptedModel("first", then="again")
    assert [(await answer(model))[1].text for _ in range(3)] == ["first", "again", "again"]


async def test_one_request_too_many_says_what_was_asked() -> None:
    model = ScriptedModel("only")
    await answer(model)
    with pytest.raises(ScriptExhausted, match="has 1 turns, and was asked for turn 2") as caught:
        await answer(model, request(said("and now?")))
    assert "and now?" in str(caught.value)
    assert isinstance(caught.value, ModelRefused)


async def test_a_script_that_was_not_finished_is_told_of() -> None:
    model = ScriptedModel("one", "two")
    await answer(model)
    assert model.remaining == 1
    with pytest.raises(AssertionError, match="1 of its 2 turns; the next is 'two'"):
        model.assert_finished()


async def test_requests_are_kept_as_they_were_when_they_came() -> None:
    messages: list[Message] = [said("hello")]
    model = ScriptedModel(then="yes")
    await answer(model, ModelRequest(system="S", messages=messages))
    messages.append(said("more"))
    await answer(model, ModelRequest(system="S", messages=messages))
    assert [len(asked.messages) for asked in model.requests] == [1, 2]


async def test_usage_grows_with_the_conversation_and_counts_what_was_cached() -> None:
    messages: list[Message] = [said("x" * 400)]
    model = ScriptedModel(then="y" * 40)
    _, first = await answer(model, ModelRequest(system="S" * 40, messages=messages))
    messages += [first, said("z" * 40)]
    _, second = await answer(model, ModelRequest(system="S" * 40, messages=messages))
    assert first.usage == Usage(requests=1, input_tokens=110, output_tokens=10)
    assert second.usage == Usage(
        requests=1, input_tokens=130, output_tokens=10, cache_read_tokens=110
    )


async def test_usage_and_stop_can_be_said() -> None:
    usage = Usage(requests=1, input_tokens=5, cost=1.5)
    _, message = await answer(ScriptedModel(Turn("cut", usage=usage, stop="length")))
    assert (message.usage, message.stop) == (usage, "length")


async def test_what_tools_gave_back_is_at_hand() -> None:
    back = ToolReturn(call_id="1", name="bash", text="a.txt")
    asked = request(said("look"), ToolReturns((back,)))
    assert last_returns(asked) == (back,)
    assert last_text(asked) == "a.txt"
    assert last_returns(request()) == ()


async def test_name_and_info_are_settable() -> None:
    model = ScriptedModel(name="scripted/small", info=ModelInfo(context_window=1000))
    assert (model.name, model.info.context_window) == ("scripted/small", 1000)
    await model.aclose()
    assert model.closed


async def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidOption, match="cannot have 7 in it"):
        await answer(ScriptedModel([7]))  # type: ignore[list-item]
