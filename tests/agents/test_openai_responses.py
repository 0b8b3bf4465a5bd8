"""Tests of an agent over OpenAI's Responses API, with a fake server and real HTTP."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from smokebox import virtual
from smokebox.agents import Durability, init
from smokebox.agents.models import open_model
from smokebox.errors import ModelRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# The first use of a provider imports it, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(120)

SPEC = "openai/gpt-5.2"


class ResponsesServer:
    """A server of `/v1/responses`. A turn is a text, a call with its arguments, or a status."""

    def __init__(self, *turns: str | tuple[str, dict[str, Any]] | int) -> None:
        self._turns = iter(turns)
        self._numbers = itertools.count(1)
        self.received: list[dict[str, Any]] = []
        self.url = ""

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.received.append(await request.json())
        turn = next(self._turns)
        if isinstance(turn, int):
            body = {"error": {"message": "no such parameter", "type": "invalid_request_error"}}
            return web.json_response(body, status=turn)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(self._events(turn)):
            data = json.dumps({**event, "sequence_number": number})
            await response.write(f"event: {event['type']}\ndata: {data}\n\n".encode())
        return response

    def _events(self, turn: str | tuple[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
        number = next(self._numbers)
        yield {"type": "response.created", "response": self._response("in_progress", [])}
        if isinstance(turn, str):
            item, events = self._message(number, turn), self._text_events(number, turn)
        else:
            item, events = self._call(number, *turn), self._call_events(number, turn[1])
        nothing: dict[str, Any] = {"content": []} if isinstance(turn, str) else {"arguments": ""}
        empty = {**item, "status": "in_progress", **nothing}
        yield {"type": "response.output_item.added", "output_index": 0, "item": empty}
        yield from events
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        yield {"type": "response.completed", "response": self._response("completed", [item])}

    def _text_events(self, number: int, text: str) -> Iterator[dict[str, Any]]:
        at = {"item_id": f"msg_{number}", "output_index": 0, "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": []}
        yield {"type": "response.content_part.added", **at, "part": part}
        for word in text.split(" "):
            delta = {"delta": f"{word} ", "logprobs": []}
            yield {"type": "response.output_text.delta", **at, **delta}
        yield {"type": "response.output_text.done", **at, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": {**part, "text": text}}

    def _call_events(self, number: int, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        at = {"item_id": f"fc_{number}", "output_index": 0}
        text = json.dumps(arguments)
        for half in (text[:5], text[5:]):
            yield {"type": "response.function_call_arguments.delta", **at, "delta": half}
        yield {"type": "response.function_call_arguments.done", **at, "arguments": text}

    def _message(self, number: int, text: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        kind = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        return {**kind, "status": "completed", "content": content}

    def _call(self, number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        kind = {"id": f"fc_{number}", "type": "function_call", "call_id": f"call_{number}"}
        return {**kind, "name": name, "arguments": json.dumps(arguments), "status": "completed"}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {
            "input_tokens": 30,
            "input_tokens_details": {"cached_tokens": 10},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 37,
        }
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "status": status,
            "model": "gpt-5.2",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage if status == "completed" else None,
        }


@contextlib.asynccontextmanager
async def responses_server(
    *turns: str | tuple[str, dict[str, Any]] | int,
) -> AsyncIterator[ResponsesServer]:
    server = ResponsesServer(*turns)
    app = web.Application()
    app.router.add_post("/v1/responses", server.respond)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


async def prompt(server: ResponsesServer, text: str) -> Any:
    config = {"openai": {"base_url": server.url, "api_key": "k", "api": "responses"}}
    async with contextlib.aclosing(open_model(SPEC, config)) as model:
        assert model.info.images  # Imports the provider, so that it does not count as a stall.
        quick = Durability(retry_delay=0.001)
        async with init(model=model, sandbox=virtual(), persist=False, durability=quick) as harness:
            return await (await harness.session()).prompt(text)


async def test_tool_calls_round_trip() -> None:
    async with responses_server(("bash", {"command": "echo $((6 * 7))"}), "It is 42.") as server:
        reply = await prompt(server, "6 times 7?")
    assert reply.text.strip() == "It is 42."
    assert (reply.usage.input_tokens, reply.usage.cache_read_tokens) == (60, 20)
    first, second = server.received
    assert {tool["name"] for tool in first["tools"]} >= {"bash", "read"}
    (returned,) = [item for item in second["input"] if item.get("type") == "function_call_output"]
    assert (returned["call_id"], "42" in returned["output"]) == ("call_1", True)


async def test_temporary_error_is_retried_and_permanent_error_raised() -> None:
    async with responses_server(503, "Here.") as server:
        assert (await prompt(server, "Where?")).text.strip() == "Here."
    async with responses_server(400) as server:
        with pytest.raises(ModelRefused, match="no such parameter"):
            await prompt(server, "Where?")
