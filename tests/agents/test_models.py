"""Models of providers, asked over real HTTP in the dialects that they speak."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.messages import (
    AssistantMessage,
    Image,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    ToolReturns,
    UserMessage,
)
from smokebox.agents.model import CallDelta, ModelRequest, TextDelta, ThinkingDelta, ToolSpec
from smokebox.agents.models import ProviderModel, open_model
from smokebox.errors import ContextOverflow, InvalidOption, ModelRefused, ModelUnavailable
from smokebox.testing import FakeModelServer, ScriptedModel, Turn, call, faults, think

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.agents.model import Delta, Model
    from smokebox.testing.faults import Fault

# The first to use a provider imports it, which takes seconds where others compute as well.
pytestmark = pytest.mark.timeout(120)

ANTHROPIC, OPENAI, OPENROUTER = (
    "anthropic/claude-sonnet-4-6",
    "openai/gpt-5.2",
    "openrouter/moonshotai/kimi-k2.6",
)
SPECS = [ANTHROPIC, OPENAI, OPENROUTER]
LS = ToolSpec(
    "bash",
    "Run a command.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


def said(text: str) -> UserMessage:
    return UserMessage((Text(text),))


def asking(*messages: Message, **more: object) -> ModelRequest:
    return ModelRequest(
        system="Be brief.",
        messages=messages or (said("hello"),),
        **more,  # type: ignore[arg-type]
    )


async def answer(
    model: Model, request: ModelRequest | None = None
) -> tuple[list[Delta], AssistantMessage]:
    items = [item async for item in model.stream(request or asking())]
    last = items[-1]
    assert isinstance(last, AssistantMessage)
    return [item for item in items if not isinstance(item, AssistantMessage)], last


@pytest.mark.parametrize("spec", SPECS)
async def test_words_come_as_they_are_said(spec: str) -> None:
    async with FakeModelServer("Hello there.", chunk=5) as server:
        model = open_model(spec, server.config)
        deltas, message = await answer(model)
        await model.aclose()
    assert deltas == [TextDelta("Hello"), TextDelta(" ther"), TextDelta("e.")]
    assert (message.text, message.stop, message.model) == ("Hello there.", "end", spec)
    assert server.requests[0].system == "Be brief."
    assert server.requests[0].messages == (said("hello"),)


@pytest.mark.parametrize("spec", SPECS)
async def test_tools_go_round(spec: str) -> None:
    look = Turn([think("hm"), "Look:", call("bash", command="ls")])
    async with FakeModelServer(look, "One file.") as server:
        model = open_model(spec, server.config)
        messages: list[Message] = [said("hello")]
        deltas, first = await answer(model, asking(*messages, tools=[LS]))
        back = ToolReturn(call_id=first.calls[0].id, name="bash", text="a.txt", is_error=True)
        messages += [first, ToolReturns((back,))]
        _, second = await answer(model, asking(*messages, tools=[LS]))
        await model.aclose()
    assert deltas[:2] == [ThinkingDelta("hm"), TextDelta("Look:")]
    assert CallDelta("bash") in deltas
    assert first.stop == "tool_calls"
    assert json.loads(first.calls[0].arguments) == {"command": "ls"}
    assert second.text == "One file."
    sent = server.requests[1].messages
    assert isinstance(sent[1], AssistantMessage)
    assert sent[1].calls[0].id == first.calls[0].id
    assert isinstance(sent[2], ToolReturns)
    assert "a.txt" in sent[2].returns[0].text
    assert server.requests[1].tools[0].name == "bash"


async def test_a_signed_thought_goes_back_as_it_came() -> None:
    async with FakeModelServer([think("hm"), call("bash", command="ls")], then="ok") as server:
        model = open_model(ANTHROPIC, server.config)
        _, first = await answer(model, asking(tools=[LS]))
        back = ToolReturns((ToolReturn(call_id=first.calls[0].id, name="bash", text="x"),))
        await answer(model, asking(said("hello"), first, back, tools=[LS]))
        await model.aclose()
    thought = first.parts[0]
    assert isinstance(thought, Thinking)
    assert thought.signature
    content = server.received[1].body["messages"][1]["content"]
    assert content[0] == {
        "type": "thinking",
        "thinking": "hm",
        "signature": thought.signature,
    }


@pytest.mark.parametrize("spec", [OPENAI, OPENROUTER])
async def test_thoughts_of_others_go_back_to_them(spec: str) -> None:
    async with FakeModelServer([think("hm"), call("bash", command="ls")], then="ok") as server:
        model = open_model(spec, server.config)
        _, first = await answer(model, asking(tools=[LS]))
        back = ToolReturns((ToolReturn(call_id=first.calls[0].id, name="bash", text="x"),))
        await answer(model, asking(said("hello"), first, back, tools=[LS]))
        await model.aclose()
    assert first.parts[0].text == "hm"  # type: ignore[union-attr]
    if spec == OPENROUTER:
        (turn,) = [m for m in server.received[1].body["messages"] if m["role"] == "assistant"]
        assert turn["reasoning_details"][0]["text"] == "hm"


@pytest.mark.parametrize("spec", SPECS)
async def test_a_conversation_of_another_provider_is_understood(spec: str) -> None:
    before = AssistantMessage(
        parts=(Thinking("hm", "theirs"), Text("I see."), ToolCall("id-1", "bash", "{}")),
        model="elsewhere/model",
        stop="tool_calls",
    )
    back = ToolReturns((ToolReturn(call_id="id-1", name="bash", text=""),))
    async with FakeModelServer("ok") as server:
        model = open_model(spec, server.config)
        _, message = await answer(model, asking(said("hello"), before, back, tools=[LS]))
        await model.aclose()
    assert message.text == "ok"


@pytest.mark.parametrize("spec", SPECS)
async def test_broken_arguments_do_not_break_the_conversation(spec: str) -> None:
    broken = ToolCall("id-1", "bash", '{"command": "ls')
    async with FakeModelServer(broken, "ok") as server:
        model = open_model(spec, server.config)
        _, first = await answer(model, asking(tools=[LS]))
        assert first.calls[0].arguments == broken.arguments
        back = ToolReturns((ToolReturn(call_id="id-1", name="bash", text="bad", is_error=True),))
        _, second = await answer(model, asking(said("hello"), first, back, tools=[LS]))
        await model.aclose()
    assert second.text == "ok"


@pytest.mark.parametrize("spec", SPECS)
async def test_pictures_are_loaded_and_sent(spec: str) -> None:
    picture = Image("image/png", "abc", 3)

    async def load(image: Image) -> bytes:
        assert image is picture
        return b"png"

    async with FakeModelServer("A cat.") as server:
        model = open_model(spec, server.config)
        await answer(model, asking(UserMessage((Text("What is it?"), picture)), load=load))
        await model.aclose()
    (message,) = server.requests[0].messages
    assert isinstance(message, UserMessage)
    assert [type(part) for part in message.parts] == [Text, Image]


async def test_pictures_of_tools_are_sent_and_blind_models_are_told() -> None:
    picture = Image("image/png", "abc", 3)
    config = {"blind": {"base_url": "", "images": False}}

    async def load(_: Image) -> bytes:
        return b"png"

    first = AssistantMessage(parts=(ToolCall("i", "read", "{}"),), model="x/y", stop="tool_calls")
    back = ToolReturns((ToolReturn(call_id="i", name="read", text="", images=(picture,)),))
    async with FakeModelServer(then="ok") as server:
        config["blind"]["base_url"] = server.url + "/v1"
        seeing = open_model(ANTHROPIC, server.config)
        blind = open_model("blind/m", {"blind": {**config["blind"], "api_key": server.api_key}})
        for model in (seeing, blind):
            await answer(model, asking(said("look"), first, back, load=load))
            await model.aclose()
    sent = [request.messages[-1] for request in server.requests]
    assert isinstance(sent[0], ToolReturns)
    assert len(sent[0].returns[0].images) == 1
    assert isinstance(sent[1], ToolReturns)
    assert "cannot see" in sent[1].returns[0].text


@pytest.mark.parametrize("spec", [ANTHROPIC, OPENAI])
async def test_a_schema_is_sent_where_the_provider_holds_to_it(spec: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    async with FakeModelServer('{"n": 4}') as server:
        model = open_model(spec, server.config)
        assert model.info.native_results
        _, message = await answer(model, asking(result=schema))
        await model.aclose()
    assert message.text == '{"n": 4}'
    result = server.requests[0].result
    assert result is not None
    assert result["properties"] == {"n": {"type": "integer"}}


@pytest.mark.parametrize("spec", SPECS)
async def test_usage_counts_what_came_from_the_cache(spec: str) -> None:
    async with FakeModelServer(then="yes " * 10) as server:
        model = open_model(spec, server.config)
        messages: list[Message] = [said("x" * 4000)]
        _, first = await answer(model, asking(*messages))
        messages += [first, said("more")]
        _, second = await answer(model, asking(*messages))
        await model.aclose()
    assert first.usage.requests == 1
    assert first.usage.input_tokens > 1000
    assert first.usage.output_tokens == 10
    assert 1000 < second.usage.cache_read_tokens < second.usage.input_tokens
    assert first.usage.cost is not None
    assert first.usage.cost > 0


async def test_anthropic_is_told_what_to_cache() -> None:
    async with FakeModelServer(then="yes") as server:
        model = open_model(ANTHROPIC, server.config)
        _, first = await answer(model, asking(tools=[LS]))
        await model.aclose()
    body = server.received[0].body
    assert body["system"][-1]["cache_control"]
    assert body["tools"][-1]["cache_control"]
    assert first.usage.cache_write_tokens > 0


async def test_thinking_is_asked_for_as_the_provider_wants_it() -> None:
    async with FakeModelServer(then="yes") as server:
        claude = open_model(ANTHROPIC, server.config)
        gpt = open_model(OPENAI, server.config)
        for model in (claude, gpt):
            for level in ("off", "high"):
                await answer(model, asking(thinking=level))
            await model.aclose()
    off, high, none, much = [one.body for one in server.received]
    assert high.get("thinking", {}).get("type") in ("enabled", "adaptive")
    assert off.get("thinking", {"type": "disabled"})["type"] == "disabled"
    assert much["reasoning_effort"] == "high"
    assert none["reasoning_effort"] in ("none", "minimal", "low")


async def test_the_prefix_of_a_conversation_is_sent_the_same_each_time() -> None:
    async with FakeModelServer(then=call("bash", command="ls")) as server:
        model = open_model(OPENAI, server.config)
        messages: list[Message] = [said("go")]
        for _ in range(4):
            _, message = await answer(model, asking(*messages, tools=[LS]))
            back = ToolReturn(call_id=message.calls[0].id, name="bash", text="a.txt")
            messages += [message, ToolReturns((back,))]
        await model.aclose()
    bodies = [one.body for one in server.received]
    for before, after in itertools.pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]


async def test_a_message_is_converted_once_and_forgotten_with_it() -> None:
    async with FakeModelServer(then="yes") as server:
        model = open_model(OPENAI, server.config)
        assert isinstance(model, ProviderModel)
        kept = [said("one"), said("two")]
        await answer(model, asking(*kept))
        link = model._linked()
        first = await link.messages(asking(*kept))
        again = await link.messages(asking(*kept))
        assert all(a is b for a, b in zip(first, again, strict=True))
        del kept, first, again
        gc.collect()
        assert link._converted == {}
        await model.aclose()


UNAVAILABLE: list[Fault | Turn] = [
    faults.rate_limited(retry_after=7),
    faults.overloaded(),
    faults.server_error(),
    faults.server_error(502),
    faults.cut_off(),
    faults.ended_early(),
    faults.garbled(),
    faults.failed_midway(),
    faults.garbage(),
]
NAMES = ["429", "overloaded", "500", "502", "cut", "ended", "garbled", "midway", "garbage"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("fault", UNAVAILABLE, ids=NAMES)
async def test_what_may_pass_is_unavailable_and_asked_once(spec: str, fault: Fault | Turn) -> None:
    async with FakeModelServer(fault, "again") as server:
        model = open_model(spec, server.config)
        with pytest.raises(ModelUnavailable) as caught:
            await answer(model)
        assert caught.value.model == spec
        assert len(server.received) == 1
        if fault is UNAVAILABLE[0]:
            assert (caught.value.status, caught.value.retry_after) == (429, 7)
        assert (await answer(model))[1].text == "again"
        await model.aclose()


@pytest.mark.parametrize("spec", SPECS)
async def test_a_conversation_that_is_too_long_overflows(spec: str) -> None:
    async with FakeModelServer(faults.context_overflow()) as server:
        model = open_model(spec, server.config)
        with pytest.raises(ContextOverflow, match="too long for"):
            await answer(model)
        await model.aclose()


@pytest.mark.parametrize("spec", SPECS)
async def test_what_no_retry_mends_is_refused(spec: str) -> None:
    async with FakeModelServer(faults.bad_request("max_tokens: too many"), models=None) as server:
        model = open_model(spec, server.config)
        with pytest.raises(ModelRefused, match="max_tokens: too many"):
            await answer(model)
        await model.aclose()


@pytest.mark.parametrize("spec", SPECS)
async def test_a_key_that_opens_nothing_is_told_with_its_variable(spec: str) -> None:
    provider = spec.partition("/")[0]
    async with FakeModelServer() as server:
        config = {provider: {**server.config[provider], "api_key": "wrong"}}
        model = open_model(spec, config)
        with pytest.raises(ModelRefused, match=f"{provider.upper()}_API_KEY") as caught:
            await answer(model)
        await model.aclose()
    assert caught.value.status == 401


@pytest.mark.parametrize("spec", SPECS)
async def test_a_model_that_is_not_there_is_refused(spec: str) -> None:
    async with FakeModelServer(models=("other",)) as server:
        model = open_model(spec, server.config)
        with pytest.raises(ModelRefused, match="there is no model"):
            await answer(model)
        await model.aclose()


async def test_nobody_at_the_address_is_unavailable() -> None:
    async with FakeModelServer() as server:
        config = server.config
    model = open_model(OPENAI, config)
    with pytest.raises(ModelUnavailable):
        await answer(model)
    await model.aclose()


@pytest.mark.parametrize("spec", SPECS)
async def test_a_stream_that_stalls_can_be_left(spec: str) -> None:
    async with FakeModelServer(faults.stalled("Half")) as server:
        model = open_model(spec, server.config)
        heard: list[object] = []

        async def listen() -> None:
            async for item in model.stream(asking()):
                heard.append(item)  # noqa: PERF401

        task = asyncio.create_task(listen())
        async with asyncio.timeout(15):
            while not heard:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await model.aclose()
    assert heard == [TextDelta("Half")]


@pytest.mark.parametrize(("stop", "spec"), [("length", ANTHROPIC), ("length", OPENAI)])
async def test_why_a_model_stopped_is_told(stop: str, spec: str) -> None:
    async with FakeModelServer(Turn("Half", stop="length"), Turn("No.", stop="refused")) as server:
        model = open_model(spec, server.config)
        assert (await answer(model))[1].stop == stop
        assert (await answer(model))[1].stop == "refused"
        await model.aclose()


async def test_headers_and_limits_of_a_server_of_ones_own() -> None:
    async with FakeModelServer("yes") as server:
        config = {
            "mine": {
                "base_url": server.url + "/v1",
                "api_key": server.api_key,
                "headers": {"x-team": "agents"},
                "context_window": 4096,
                "max_output": 512,
            }
        }
        model = open_model("mine/qwen/qwen3", config)
        assert (model.info.context_window, model.info.max_output) == (4096, 512)
        _, message = await answer(model)
        await model.aclose()
    assert message.model == "mine/qwen/qwen3"
    assert message.usage.cost is None
    assert server.received[0].headers["x-team"] == "agents"
    assert server.received[0].body["model"] == "qwen/qwen3"
    assert server.requests[0].max_tokens == 512


def test_a_key_is_found_in_the_env_file_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelRefused, match=r"in \.env"):
        open_model(ANTHROPIC)
    (tmp_path / ".env").write_text("ANTHROPIC_API_KEY=of-the-project\n")
    assert open_model(ANTHROPIC).name == ANTHROPIC


def test_what_is_known_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    model = open_model(ANTHROPIC, {})
    assert model.name == ANTHROPIC
    assert (model.info.context_window or 0) >= 200_000
    assert model.info.thinking
    assert model.info.images


PROGRAM = """
import asyncio, gc
from smokebox.agents import init
from smokebox.agents.models import open_model
from smokebox.testing import FakeModelServer

async def ask(model):
    harness = await init(model=model, sandbox=None, persist=False)
    print((await (await harness.session()).prompt("?")).text)

with FakeModelServer(then="yes") as server:
    for spec in ("anthropic/claude-sonnet-4-6", "openai/gpt-5.2"):
        model = open_model(spec, server.config)
        asyncio.run(ask(model))
        asyncio.run(ask(model))
        del model
        gc.collect()
"""


def test_a_model_that_nobody_closes_goes_with_its_event_loop() -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.stdout, done.stderr) == ("yes\n" * 4, "")


def test_a_model_object_is_taken_as_it_is() -> None:
    model = ScriptedModel("yes")
    assert open_model(model) is model


def test_naming_a_model_imports_nothing() -> None:
    program = """
import sys
from smokebox.agents.models import open_model
open_model("anthropic/claude-sonnet-4-6", {"anthropic": {"api_key": "k"}})
heavy = {"pydantic_ai", "anthropic", "openai", "genai_prices", "pydantic"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_a_key_the_variable_and_a_way_without_one_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ModelRefused, match="ANTHROPIC_API_KEY is not set") as caught:
        open_model(ANTHROPIC, {})
    assert "ScriptedModel" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("anthropc/claude", "Did you mean 'anthropic'"),
        ("claude-sonnet-4-6", "provider/model"),
        ("anthropic/", "provider/model"),
        ("", "provider/model"),
    ],
)
def test_a_name_nobody_knows_is_told_with_the_nearest(spec: str, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        open_model(spec, {})
