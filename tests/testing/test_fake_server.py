"""FakeModelServer: replies, checks of requests and faults as those of the real providers."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from smokebox.agents.messages import Text, ToolReturns, UserMessage
from smokebox.errors import ContextOverflow
from smokebox.testing import FakeModelServer, Turn, call, faults, last_returns, last_text, think

if TYPE_CHECKING:
    from smokebox.agents.model import ModelRequest

Body = dict[str, Any]
KEY = FakeModelServer.api_key
HEADERS = {
    "/v1/messages": {"x-api-key": KEY, "anthropic-version": "2023-06-01"},
    "/v1/chat/completions": {"authorization": f"Bearer {KEY}"},
    "/api/v1/chat/completions": {"authorization": f"Bearer {KEY}"},
}
MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
HELLO: Body = {"role": "user", "content": "hello"}


def body(path: str, *turns: Body, **options: Any) -> Body:
    required = {"model": "m", "messages": list(turns) or [HELLO]}
    return required | ({"max_tokens": 100} if path == MESSAGES else {}) | options


async def post(
    server: FakeModelServer, path: str, body: Body, headers: dict[str, str] | None = None
) -> tuple[int, str, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(server.url + path, json=body, headers=headers or HEADERS[path]) as response,
    ):
        lower = {name.lower(): value for name, value in response.headers.items()}
        return response.status, await response.text(errors="replace"), lower


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
async def test_text_is_sent_whole_or_streamed(path: str) -> None:
    async with FakeModelServer(then="Hello there, you.", chunk=5) as server:
        _, whole, _ = await post(server, path, body(path))
        _, streamed, _ = await post(server, path, body(path, stream=True))
    message = json.loads(whole)
    if path == MESSAGES:
        assert message["content"] == [{"type": "text", "text": "Hello there, you."}]
        assert message["stop_reason"] == "end_turn"
        pieces = [e["delta"]["text"] for e in events(streamed) if "text" in e.get("delta", {})]
    else:
        assert message["choices"][0]["message"]["content"] == "Hello there, you."
        deltas = [e["choices"][0]["delta"] for e in events(streamed) if e["choices"]]
        pieces = [delta["content"] for delta in deltas if delta.get("content")]
        assert streamed.endswith("data: [DONE]\n\n")
    assert pieces == ["Hello", " ther", "e, yo", "u."]


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
async def test_function_gets_the_parsed_request(path: str) -> None:
    seen: list[ModelRequest] = []

    def turn(request: ModelRequest) -> str:
        seen.append(request)
        return last_text(request).upper()

    request = body(path, system="Be brief.") if path == MESSAGES else body(path)
    async with FakeModelServer(turn) as server:
        _, text, _ = await post(server, path, request)
    assert "HELLO" in text
    assert seen[0].messages == (UserMessage((Text("hello"),)),)
    assert server.requests == seen


async def test_tool_calls_and_results_of_messages() -> None:
    script = (call("bash", command="ls"), lambda request: last_returns(request)[0].text)
    async with FakeModelServer(*script) as server:
        _, text, _ = await post(server, MESSAGES, body(MESSAGES))
        message = json.loads(text)
        (tool_use,) = message["content"]
        assert (tool_use["input"], message["stop_reason"]) == ({"command": "ls"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": tool_use["id"], "content": "a.txt"}
        turns = (
            HELLO,
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [result]},
        )
        _, text, _ = await post(server, MESSAGES, body(MESSAGES, *turns))
    assert json.loads(text)["content"][0]["text"] == "a.txt"


async def test_tool_calls_and_results_of_chat() -> None:
    script = (call("bash", command="ls"), lambda request: last_returns(request)[0].text)
    async with FakeModelServer(*script) as server:
        _, text, _ = await post(server, CHAT, body(CHAT))
        message = json.loads(text)["choices"][0]["message"]
        (tool_call,) = message["tool_calls"]
        assert json.loads(tool_call["function"]["arguments"]) == {"command": "ls"}
        result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "a.txt"}
        _, text, _ = await post(server, CHAT, body(CHAT, HELLO, message, result))
    assert json.loads(text)["choices"][0]["message"]["content"] == "a.txt"
    assert isinstance(server.requests[-1].messages[-1], ToolReturns)


TOOL_USE = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "b", "input": {}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "x"}
TOOL_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "b", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (
            body(MESSAGES, HELLO, TOOL_USE, HELLO),
            "without `tool_result` blocks immediately after: t1",
        ),
        (body(MESSAGES, HELLO, TOOL_USE), "without `tool_result` blocks"),
        (body(MESSAGES, {"role": "user", "content": [RESULT]}), "unexpected `tool_use_id`"),
        (
            body(
                MESSAGES,
                HELLO,
                TOOL_USE,
                {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]},
            ),
            "must come first",
        ),
        (body(MESSAGES, {"role": "user", "content": " "}), "non-whitespace"),
        (body(MESSAGES, {"role": "user", "content": ""}), "non-empty"),
        (body(MESSAGES, {"role": "assistant", "content": "x"}), 'must use the "user" role'),
        (body(MESSAGES, {"role": "system", "content": "x"}), "first message"),
        (body(MESSAGES, max_tokens=0), "greater than 0"),
        ({"model": "m", "messages": [HELLO]}, "max_tokens: Field required"),
        (body(MESSAGES, tools=[{"name": "a b", "input_schema": {"type": "object"}}]), "pattern"),
        (body(MESSAGES, tools=[{"name": "a", "input_schema": {"type": "string"}}]), "'object'"),
        (body(MESSAGES, tools=[{"name": "a", "input_schema": {"type": "object"}}] * 2), "unique"),
        (body(MESSAGES, thinking={"type": "enabled", "budget_tokens": 2000}), "must be greater"),
        (
            body(
                MESSAGES,
                HELLO,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]},
            ),
            "Invalid `signature`",
        ),
        (
            body(
                MESSAGES,
                system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5,
            ),
            "maximum of 4 blocks with cache_control may be provided. Found 5",
        ),
    ],
)
async def test_invalid_requests_are_rejected_as_by_anthropic(
    request_body: Body, message: str
) -> None:
    async with FakeModelServer(then="yes") as server:
        status, text, _ = await post(server, MESSAGES, request_body)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
    assert server.received[0].request is None


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        (body(CHAT, HELLO, TOOL_CALL, HELLO), "did not have response messages: t1"),
        (body(CHAT, {"role": "tool", "tool_call_id": "t1", "content": "x"}), "must be a response"),
        (body(CHAT, {"role": "robot", "content": "x"}), "Invalid value: 'robot'"),
        ({"model": "m", "messages": []}, "empty array"),
        ({"messages": [HELLO]}, "provide a model"),
        (body(CHAT, tools=[{"function": {"name": "a b"}}]), "pattern"),
        (
            body(
                CHAT,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "r", "strict": True, "schema": {"type": "object"}},
                },
            ),
            "additionalProperties",
        ),
    ],
)
async def test_invalid_requests_are_rejected_as_by_openai(request_body: Body, message: str) -> None:
    async with FakeModelServer(then="yes") as server:
        status, text, _ = await post(server, CHAT, request_body)
    assert status == 400
    assert message in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
async def test_wrong_key_is_unauthorized(path: str) -> None:
    async with FakeModelServer("yes") as server:
        status, _, _ = await post(server, path, body(path), {"authorization": "Bearer no"})
    assert status == 401


@pytest.mark.parametrize(("path", "busy"), [(MESSAGES, 529), (CHAT, 503)])
async def test_faults_have_the_status_of_the_provider(path: str, busy: int) -> None:
    script = (faults.rate_limited(retry_after=1.5), faults.overloaded(), faults.server_error(502))
    async with FakeModelServer(*script, faults.context_overflow(), faults.garbage()) as server:
        responses = [await post(server, path, body(path)) for _ in range(5)]
    assert [status for status, _, _ in responses] == [429, busy, 502, 400, 200]
    assert responses[0][2]["retry-after"] == "1.5"
    assert "maximum context length" in responses[3][1]
    assert responses[4][1].startswith("<html>")
    assert [one.status for one in server.received] == [429, busy, 502, 400, 200]


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
@pytest.mark.parametrize("stream", [True, False])
async def test_connection_is_cut(path: str, stream: bool) -> None:
    async with FakeModelServer(faults.cut_off()) as server:
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(server, path, body(path, stream=stream))


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
async def test_streams_end_with_other_faults(path: str) -> None:
    script = (faults.ended_early("Half"), faults.garbled("Half"), faults.failed_midway("Half"))
    async with FakeModelServer(*script) as server:
        texts = [(await post(server, path, body(path, stream=True)))[1] for _ in range(3)]
    assert all("Half" in text for text in texts)
    assert not any("message_stop" in text or "[DONE]" in text for text in texts)
    with pytest.raises(json.JSONDecodeError):
        events(texts[1])
    assert "error" in events(texts[2])[-1]


async def test_smokebox_errors_become_provider_errors() -> None:
    async with FakeModelServer(ContextOverflow("too long", model="m")) as server:
        status, text, _ = await post(server, CHAT, body(CHAT))
    assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")


async def test_request_over_the_context_window_is_rejected() -> None:
    async with FakeModelServer(then="yes", context_window=100) as server:
        long = {"role": "user", "content": "x" * 1000}
        status, text, _ = await post(server, MESSAGES, body(MESSAGES, long))
        assert (await post(server, MESSAGES, body(MESSAGES)))[0] == 200
    assert status == 400
    assert "prompt is too long" in text


async def test_unknown_model_is_not_found() -> None:
    async with FakeModelServer(then="yes", models=("known",)) as server:
        assert (await post(server, CHAT, body(CHAT)))[0] == 404
        assert (await post(server, CHAT, body(CHAT, model="known")))[0] == 200


async def test_models_are_listed() -> None:
    async with FakeModelServer(models=("a", "b")) as server, aiohttp.ClientSession() as http:
        async with http.get(server.url + "/v1/models", headers=HEADERS[CHAT]) as response:
            assert [one["id"] for one in (await response.json())["data"]] == ["a", "b"]
        async with http.get(server.url + "/v1/models") as response:
            assert response.status == 401


async def test_request_after_the_last_turn_is_rejected() -> None:
    async with FakeModelServer() as server:
        status, text, _ = await post(server, CHAT, body(CHAT))
    assert status == 400
    assert "has 0 turns, but turn 1 was requested" in text
    assert "hello" in text


async def test_repeated_prefix_is_read_from_the_cache() -> None:
    turns = [HELLO, {"role": "assistant", "content": "yes"}, HELLO]
    async with FakeModelServer(then="yes") as server:
        await post(server, CHAT, body(CHAT))
        _, text, _ = await post(server, CHAT, body(CHAT, *turns))
        _, other, _ = await post(server, CHAT, body(CHAT, {"role": "user", "content": "hi"}))
    assert json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert not json.loads(other)["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_anthropic_caches_marked_blocks_only() -> None:
    marked = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    async with FakeModelServer(then="yes") as server:
        await post(server, MESSAGES, body(MESSAGES))
        _, plain, _ = await post(server, MESSAGES, body(MESSAGES))
        _, first, _ = await post(server, MESSAGES, body(MESSAGES, system=marked))
        _, second, _ = await post(server, MESSAGES, body(MESSAGES, system=marked))
    keys = ("cache_creation_input_tokens", "cache_read_input_tokens")
    used = [
        [bool(json.loads(text)["usage"][key]) for key in keys] for text in (plain, first, second)
    ]
    assert used == [[False, False], [True, False], [False, True]]


async def test_thinking_is_signed_and_must_be_sent_back_unchanged() -> None:
    async with FakeModelServer([think("hm"), "Done."], then="ok") as server:
        _, text, _ = await post(server, MESSAGES, body(MESSAGES))
        content = json.loads(text)["content"]
        again = {"role": "assistant", "content": content}
        assert (await post(server, MESSAGES, body(MESSAGES, HELLO, again, HELLO)))[0] == 200
        content[0]["thinking"] = "other"
        status, text, _ = await post(server, MESSAGES, body(MESSAGES, HELLO, again, HELLO))
    assert status == 400
    assert "Invalid `signature`" in text


async def test_openrouter_has_its_own_fields_for_thinking() -> None:
    path = "/api/v1/chat/completions"
    async with FakeModelServer([think("hm"), "Done."]) as server:
        _, text, _ = await post(server, path, body(path))
    message = json.loads(text)["choices"][0]["message"]
    assert message["reasoning_details"][0]["text"] == "hm"


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_ends_stalled_requests_without_logging_errors(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeModelServer(faults.stalled("Half")) as server:
        pending = asyncio.create_task(post(server, CHAT, body(CHAT, stream=stream)))
        while not server.received:
            await asyncio.sleep(0.01)
    with pytest.raises(aiohttp.ClientError):
        await pending
    assert not caplog.records


def test_server_runs_on_a_thread() -> None:
    import urllib.request

    with FakeModelServer(Turn("yes")) as server:
        request = urllib.request.Request(
            server.url + CHAT,
            data=json.dumps(body(CHAT)).encode(),
            headers=HEADERS[CHAT] | {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.load(response)["choices"][0]["message"]["content"] == "yes"
