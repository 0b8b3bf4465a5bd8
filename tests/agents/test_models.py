"""Tests of provider models over real HTTP, in each API format."""

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
    ImagePart,
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

# The first use of a provider imports it, which takes seconds on a busy machine.
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


def user(text: str) -> UserMessage:
    return UserMessage((Text(text),))


def make_request(*messages: Message, **options: object) -> ModelRequest:
    return ModelRequest(
        system="Be brief.",
        messages=messages or (user("hello"),),
        **options,  # type: ignore[arg-type]
    )


async def answer(
    model: Model, request: ModelRequest | None = None
) -> tuple[list[Delta], AssistantMessage]:
    items = [item async for item in model.stream(request or make_request())]
    last = items[-1]
    assert isinstance(last, AssistantMessage)
    return [item for item in items if not isinstance(item, AssistantMessage)], last


@pytest.mark.parametrize("spec", SPECS)
async def test_text_is_streamed(spec: str) -> None:
    async with FakeModelServer("Hello there.", chunk=5) as server:
        model = open_model(spec, server.config)
        deltas, message = await answer(model)
        await model.aclose()
    assert deltas == [TextDelta("Hello"), TextDelta(" ther"), TextDelta("e.")]
    assert (message.text, message.stop, message.model) == ("Hello there.", "end", spec)
    assert server.requests[0].system == "Be brief."
    assert server.requests[0].messages == (user("hello"),)


@pytest.mark.parametrize("spec", SPECS)
async def test_tool_calls_and_results_round_trip(spec: str) -> None:
    look = Turn([think("hm"), "Look:", call("bash", command="ls")])
    async with FakeModelServer(look, "One file.") as server:
        model = open_model(spec, server.config)
        messages: list[Message] = [user("hello")]
        deltas, first = await answer(model, make_request(*messages, tools=[LS]))
        back = ToolReturn(call_id=first.calls[0].id, name="bash", text="a.txt", is_error=True)
        messages += [first, ToolReturns((back,))]
        _, second = await answer(model, make_request(*messages, tools=[LS]))
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


async def test_signed_thinking_is_sent_back_unchanged() -> None:
    async with FakeModelServer([think("hm"), call("bash", command="ls")], then="ok") as server:
        model = open_model(ANTHROPIC, server.config)
        _, first = await answer(model, make_request(tools=[LS]))
        back = ToolReturns((ToolReturn(call_id=first.calls[0].id, name="bash", text="x"),))
        await answer(model, make_request(user("hello"), first, back, tools=[LS]))
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
async def test_thinking_is_sent_back_to_its_provider(spec: str) -> None:
    async with FakeModelServer([think("hm"), call("bash", command="ls")], then="ok") as server:
        model = open_model(spec, server.config)
        _, first = await answer(model, make_request(tools=[LS]))
        back = ToolReturns((ToolReturn(call_id=first.calls[0].id, name="bash", text="x"),))
        await answer(model, make_request(user("hello"), first, back, tools=[LS]))
        await model.aclose()
    assert first.parts[0].text == "hm"  # type: ignore[union-attr]
    if spec == OPENROUTER:
        (turn,) = [m for m in server.received[1].body["messages"] if m["role"] == "assistant"]
        assert turn["reasoning_details"][0]["text"] == "hm"


@pytest.mark.parametrize("spec", SPECS)
async def test_conversation_of_another_provider_is_accepted(spec: str) -> None:
    before = AssistantMessage(
        parts=(Thinking("hm", "theirs"), Text("I see."), ToolCall("id-1", "bash", "{}")),
        model="elsewhere/model",
        stop="tool_calls",
    )
    back = ToolReturns((ToolReturn(call_id="id-1", name="bash", text=""),))
    async with FakeModelServer("ok") as server:
        model = open_model(spec, server.config)
        _, message = await answer(model, make_request(user("hello"), before, back, tools=[LS]))
        await model.aclose()
    assert message.text == "ok"


@pytest.mark.parametrize("spec", SPECS)
async def test_invalid_arguments_do_not_break_the_conversation(spec: str) -> None:
    broken = ToolCall("id-1", "bash", '{"command": "ls')
    async with FakeModelServer(broken, "ok") as server:
        model = open_model(spec, server.config)
        _, first = await answer(model, make_request(tools=[LS]))
        assert first.calls[0].arguments == broken.arguments
        back = ToolReturns((ToolReturn(call_id="id-1", name="bash", text="bad", is_error=True),))
        _, second = await answer(model, make_request(user("hello"), first, back, tools=[LS]))
        await model.aclose()
    assert second.text == "ok"


@pytest.mark.parametrize("spec", SPECS)
async def test_images_are_loaded_and_sent(spec: str) -> None:
    image = ImagePart("image/png", "abc", 3)

    async def load(requested: ImagePart) -> bytes:
        assert requested is image
        return b"png"

    async with FakeModelServer("A cat.") as server:
        model = open_model(spec, server.config)
        await answer(model, make_request(UserMessage((Text("What is it?"), image)), load=load))
        await model.aclose()
    (message,) = server.requests[0].messages
    assert isinstance(message, UserMessage)
    assert [type(part) for part in message.parts] == [Text, ImagePart]


async def test_images_of_tools_are_sent_or_replaced_by_text() -> None:
    image = ImagePart("image/png", "abc", 3)
    config = {"blind": {"base_url": "", "images": False}}

    async def load(_: ImagePart) -> bytes:
        return b"png"

    first = AssistantMessage(parts=(ToolCall("i", "read", "{}"),), model="x/y", stop="tool_calls")
    back = ToolReturns((ToolReturn(call_id="i", name="read", text="", images=(image,)),))
    async with FakeModelServer(then="ok") as server:
        config["blind"]["base_url"] = server.url + "/v1"
        seeing = open_model(ANTHROPIC, server.config)
        blind = open_model("blind/m", {"blind": {**config["blind"], "api_key": server.api_key}})
        for model in (seeing, blind):
            await answer(model, make_request(user("look"), first, back, load=load))
            await model.aclose()
    sent = [request.messages[-1] for request in server.requests]
    assert isinstance(sent[0], ToolReturns)
    assert len(sent[0].returns[0].images) == 1
    assert isinstance(sent[1], ToolReturns)
    assert "cannot see" in sent[1].returns[0].text


@pytest.mark.parametrize("spec", [ANTHROPIC, OPENAI])
async def test_schema_is_sent_to_providers_with_native_results(spec: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    async with FakeModelServer('{"n": 4}') as server:
        model = open_model(spec, server.config)
        assert model.info.native_results
        _, message = await answer(model, make_request(result=schema))
        await model.aclose()
    assert message.text == '{"n": 4}'
    result = server.requests[0].result
    assert result is not None
    assert result["properties"] == {"n": {"type": "integer"}}


@pytest.mark.parametrize("spec", SPECS)
async def test_usage_counts_cached_tokens(spec: str) -> None:
    async with FakeModelServer(then="yes " * 10) as server:
        model = open_model(spec, server.config)
        messages: list[Message] = [user("x" * 4000)]
        _, first = await answer(model, make_request(*messages))
        messages += [first, user("more")]
        _, second = await answer(model, make_request(*messages))
        await model.aclose()
    assert first.usage.requests == 1
    assert first.usage.input_tokens > 1000
    assert first.usage.output_tokens == 10
    assert 1000 < second.usage.cache_read_tokens < second.usage.input_tokens
    assert first.usage.cost is not None
    assert first.usage.cost > 0


async def test_anthropic_requests_have_cache_markers() -> None:
    async with FakeModelServer(then="yes") as server:
        model = open_model(ANTHROPIC, server.config)
        _, first = await answer(model, make_request(tools=[LS]))
        await model.aclose()
    body = server.received[0].body
    assert body["system"][-1]["cache_control"]
    assert body["tools"][-1]["cache_control"]
    assert first.usage.cache_write_tokens > 0


async def test_thinking_is_requested_in_the_providers_format() -> None:
    async with FakeModelServer(then="yes") as server:
        claude = open_model(ANTHROPIC, server.config)
        gpt = open_model(OPENAI, server.config)
        for model in (claude, gpt):
            for level in ("off", "high"):
                await answer(model, make_request(thinking=level))
            await model.aclose()
    off, high, none, much = [one.body for one in server.received]
    assert high.get("thinking", {}).get("type") in ("enabled", "adaptive")
    assert off.get("thinking", {"type": "disabled"})["type"] == "disabled"
    assert much["reasoning_effort"] == "high"
    assert none["reasoning_effort"] in ("none", "minimal", "low")


async def test_prefix_of_a_conversation_is_constant() -> None:
    async with FakeModelServer(then=call("bash", command="ls")) as server:
        model = open_model(OPENAI, server.config)
        messages: list[Message] = [user("go")]
        for _ in range(4):
            _, message = await answer(model, make_request(*messages, tools=[LS]))
            back = ToolReturn(call_id=message.calls[0].id, name="bash", text="a.txt")
            messages += [message, ToolReturns((back,))]
        await model.aclose()
    bodies = [one.body for one in server.received]
    for before, after in itertools.pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]


async def test_message_is_converted_once_and_cached_weakly() -> None:
    async with FakeModelServer(then="yes") as server:
        model = open_model(OPENAI, server.config)
        assert isinstance(model, ProviderModel)
        kept = [user("one"), user("two")]
        await answer(model, make_request(*kept))
        adapter = model._open_adapter()
        first = await adapter.messages(make_request(*kept))
        again = await adapter.messages(make_request(*kept))
        assert all(a is b for a, b in zip(first, again, strict=True))
        del kept, first, again
        gc.collect()
        assert adapter._converted == {}
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
async def test_temporary_error_is_not_retried(spec: str, fault: Fault | Turn) -> None:
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
async def test_too_long_conversation_overflows(spec: str) -> None:
    async with FakeModelServer(faults.context_overflow()) as server:
        model = open_model(spec, server.config)
        with pytest.raises(ContextOverflow, match="too long for"):
            await answer(model)
        await model.aclose()


@pytest.mark.parametrize("spec", SPECS)
async def test_permanent_error_is_refused(spec: str) -> None:
    async with FakeModelServer(faults.bad_request("max_tokens: too many"), models=None) as server:
        model = open_model(spec, server.config)
        with pytest.raises(ModelRefused, match="max_tokens: too many"):
            await answer(model)
        await model.aclose()


@pytest.mark.parametrize("spec", SPECS)
async def test_rejected_key_error_names_the_variable(spec: str) -> None:
    provider = spec.partition("/")[0]
    async with FakeModelServer() as server:
        config = {provider: {**server.config[provider], "api_key": "wrong"}}
        model = open_model(spec, config)
        with pytest.raises(ModelRefused, match=f"{provider.upper()}_API_KEY") as caught:
            await answer(model)
        await model.aclose()
    assert caught.value.status == 401


@pytest.mark.parametrize("spec", SPECS)
async def test_unknown_model_is_refused(spec: str) -> None:
    async with FakeModelServer(models=("other",)) as server:
        model = open_model(spec, server.config)
        with pytest.raises(ModelRefused, match="there is no model"):
            await answer(model)
        await model.aclose()


async def test_unreachable_server_is_unavailable() -> None:
    async with FakeModelServer() as server:
        config = server.config
    model = open_model(OPENAI, config)
    with pytest.raises(ModelUnavailable):
        await answer(model)
    await model.aclose()


@pytest.mark.parametrize("spec", SPECS)
async def test_stalled_stream_can_be_cancelled(spec: str) -> None:
    async with FakeModelServer(faults.stalled("Half")) as server:
        model = open_model(spec, server.config)
        received: list[object] = []

        async def consume() -> None:
            async for item in model.stream(make_request()):
                received.append(item)  # noqa: PERF401

        task = asyncio.create_task(consume())
        async with asyncio.timeout(15):
            while not received:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await model.aclose()
    assert received == [TextDelta("Half")]


@pytest.mark.parametrize(("stop", "spec"), [("length", ANTHROPIC), ("length", OPENAI)])
async def test_stop_reason_is_reported(stop: str, spec: str) -> None:
    async with FakeModelServer(Turn("Half", stop="length"), Turn("No.", stop="refused")) as server:
        model = open_model(spec, server.config)
        assert (await answer(model))[1].stop == stop
        assert (await answer(model))[1].stop == "refused"
        await model.aclose()


async def test_configured_server_has_headers_and_limits() -> None:
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


def test_key_is_read_from_the_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelRefused, match=r"in \.env"):
        open_model(ANTHROPIC)
    (tmp_path / ".env").write_text("ANTHROPIC_API_KEY=of-the-project\n")
    assert open_model(ANTHROPIC).name == ANTHROPIC


def test_capabilities_of_known_models(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unclosed_model_is_closed_with_its_event_loop() -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.stdout, done.stderr) == ("yes\n" * 4, "")


def test_model_object_is_returned_unchanged() -> None:
    model = ScriptedModel("yes")
    assert open_model(model) is model


def test_open_model_imports_nothing() -> None:
    program = """
import sys
from smokebox.agents.models import open_model
open_model("anthropic/claude-sonnet-4-6", {"anthropic": {"api_key": "k"}})
heavy = {"pydantic_ai", "anthropic", "openai", "genai_prices", "pydantic"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_missing_key_error_names_the_variable_and_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ModelRefused, match="ANTHROPIC_API_KEY is not set") as caught:
        open_model(ANTHROPIC, {})
    assert "ScriptedModel" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("anthropc/claude", "Did you mean 'anthropic'"),
        ("claude-sonnet-4-6", "provider/model"),
        ("anthropic/", "provider/model"),
        ("", "provider/model"),
    ],
)
def test_unknown_provider_suggests_the_nearest(spec: str, expected: str) -> None:
    with pytest.raises(InvalidOption, match=expected):
        open_model(spec, {})
