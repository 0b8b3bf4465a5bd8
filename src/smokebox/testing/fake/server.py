"""`FakeModelServer`: an HTTP server with the APIs of model providers and scripted replies."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.responses import JSONResponse, Response

from smokebox.agents.messages import Usage
from smokebox.agents.model import ModelRequest
from smokebox.errors import ContextOverflow, ModelRefused, ModelUnavailable
from smokebox.testing.fake.anthropic import AnthropicApi
from smokebox.testing.fake.openai import OpenAIApi
from smokebox.testing.fake.provider_api import FakeReply, RequestRejected
from smokebox.testing.faults import (
    BrokenStream,
    ErrorResponse,
    Fault,
    RawBody,
    context_overflow_message,
)
from smokebox.testing.loopback import ChunkedResponse, CutConnection, LoopbackServer
from smokebox.testing.scripted import (
    Turn,
    TurnLike,
    as_turn,
    call_if_function,
    estimate_tokens,
    last_text,
    parts_of,
    stop_of,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from smokebox.testing.fake.provider_api import ErrorKind, ParsedRequest, ProviderApi

ScriptValue: TypeAlias = TurnLike | Fault
ScriptItem: TypeAlias = ScriptValue | Callable[[ModelRequest], ScriptValue | Awaitable[ScriptValue]]
"""Item of a script: a turn, a fault, or a function of the request that returns either."""

_INVALID_KEY = "Incorrect API key provided."
_MODEL_LISTS = ("/v1/models", "/api/v1/models")
_ERROR_KINDS: dict[type[Exception], ErrorKind] = {
    ModelUnavailable: "overloaded",
    ContextOverflow: "too_long",
    ModelRefused: "invalid",
}


@dataclass(frozen=True, slots=True)
class _Provider:
    name: str
    api: ProviderApi


_PROVIDERS = {
    "/v1/messages": _Provider("anthropic", AnthropicApi()),
    "/v1/chat/completions": _Provider("openai", OpenAIApi()),
    "/api/v1/chat/completions": _Provider("openrouter", OpenAIApi(reasoning=True)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """A request for a turn. `request` is None if it was rejected."""

    provider: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    request: ModelRequest | None
    status: int


class FakeModelServer(LoopbackServer):
    """HTTP server with Anthropic's Messages API and OpenAI's chat completions API.

        async with FakeModelServer(call("bash", command="ls"), "One file.") as server:
            model = open_model("openai/gpt", config=server.config)

    The script has the turns of `ScriptedModel` and the faults of `smokebox.testing.faults`.
    Requests that the real providers reject are rejected with their messages. `received` has
    every request. `with` instead of `async with` runs it on a background thread.

    Args:
        *script: One item for each request, in order.
        then: Item for every further request.
        models: Names of known models, by default any.
        context_window: Number of tokens above which a request is rejected as too long.
        chunk: Number of characters in each event of a stream.
    """

    api_key = "test-key"

    def __init__(
        self,
        *script: ScriptItem,
        then: ScriptItem | None = None,
        models: tuple[str, ...] | None = None,
        context_window: int | None = None,
        chunk: int = 16,
    ) -> None:
        self._script = script
        self._then = then
        self._models = models
        self._window = context_window
        self._chunk = max(1, chunk)
        self._numbers = itertools.count(1)
        self._cached: set[int] = set()
        self.received: list[ReceivedRequest] = []

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return self._origin

    @property
    def config(self) -> dict[str, dict[str, str]]:
        """Configuration for `open_model` that directs requests to this server."""
        urls = {"anthropic": "", "openai": "/v1", "openrouter": "/api/v1"}
        return {
            name: {"base_url": self._origin + path, "api_key": self.api_key}
            for name, path in urls.items()
        }

    @property
    def requests(self) -> list[ModelRequest]:
        """Requests that were not rejected."""
        return [one.request for one in self.received if one.request is not None]

    async def respond(self, request: Request) -> ASGIApp:
        """Return the response to a request."""
        path = request.scope["path"]
        if request.method == "POST" and path in _PROVIDERS:
            return await self._respond_with_turn(request, _PROVIDERS[path])
        if request.method == "GET" and path in _MODEL_LISTS:
            return self._list_models(request)
        return Response("Not Found", 404)

    async def _respond_with_turn(self, request: Request, provider: _Provider) -> ASGIApp:
        api, body = provider.api, _parse_object(await request.body())
        parsed: ParsedRequest | None = None
        try:
            parsed = self._check(api, body, request.headers)
            number, item = self._next_item(parsed.request)
            item = await _resolve(item, parsed.request)
        except RequestRejected as rejected:
            parsed, item = None, ErrorResponse(rejected.kind, rejected.message)
        status = 200
        if isinstance(item, ErrorResponse):
            error = api.error(item.kind, item.message)
            status = item.status or error.status
        elif isinstance(item, RawBody):
            status = item.status
        self.received.append(
            ReceivedRequest(
                provider=provider.name,
                path=_path_with_query(request),
                headers=dict(request.headers),
                body=body,
                request=parsed.request if parsed else None,
                status=status,
            )
        )
        if isinstance(item, ErrorResponse):
            return JSONResponse(error.body, status, headers=item.headers)
        if isinstance(item, RawBody):
            return Response(item.body, status, media_type=item.content_type)
        assert parsed is not None
        turn, broken = (item.turn, item) if isinstance(item, BrokenStream) else (item, None)
        reply = self._reply(number, turn, parsed)
        await asyncio.sleep(turn.delay)
        if parsed.stream:
            events = _stream(api, turn, reply, broken)
            return ChunkedResponse(events, headers={"content-type": "text/event-stream"})
        if turn.hang:
            await asyncio.Event().wait()
        if broken is None:
            return JSONResponse(api.whole(reply))
        return _half_response(json.dumps(api.whole(reply)).encode())

    def _check(
        self, api: ProviderApi, body: dict[str, Any], headers: Mapping[str, str]
    ) -> ParsedRequest:
        if not api.authorized(headers, self.api_key):
            raise RequestRejected(_INVALID_KEY, "unauthorized")
        parsed = api.parse(body, headers)
        if self._models is not None and parsed.model not in self._models:
            raise RequestRejected(f"model: {parsed.model}", "not_found")
        tokens = sum(map(estimate_tokens, parsed.blocks))
        if self._window is not None and tokens > self._window:
            raise RequestRejected(context_overflow_message(tokens, self._window), "too_long")
        return parsed

    def _next_item(self, request: ModelRequest) -> tuple[int, ScriptItem]:
        number = next(self._numbers)
        if number <= len(self._script):
            return number, self._script[number - 1]
        if self._then is not None:
            return number, self._then
        # Status 400, which clients do not retry, so that the test ends with this message.
        raise RequestRejected(
            f"the script of FakeModelServer has {len(self._script)} turns, but turn {number} was "
            f"requested. The last message was: {last_text(request)[:200]!r}. Add a turn, or pass "
            "then= for all further requests."
        )

    def _reply(self, number: int, turn: Turn, parsed: ParsedRequest) -> FakeReply:
        parts = parts_of(turn, number=number)
        return FakeReply(
            id=f"msg_{number}",
            model=parsed.model,
            parts=parts,
            stop=stop_of(turn, parts),
            usage=turn.usage or self._usage(parsed, estimate_tokens(text_of(parts))),
            chunk=self._chunk,
        )

    def _usage(self, parsed: ParsedRequest, output: int) -> Usage:
        """Return the usage reported by a provider that has cached all earlier requests."""
        prefix, total, cached = 0, 0, 0
        for block in parsed.blocks:
            prefix = hash((prefix, block))
            total += estimate_tokens(block)
            cached = total if prefix in self._cached else cached
        self._cached.add(prefix)
        cached = cached if parsed.caches != "no" else 0
        return Usage(
            requests=1,
            input_tokens=total,
            output_tokens=output,
            cache_read_tokens=cached,
            cache_write_tokens=total - cached if parsed.caches == "marked" else 0,
        )

    def _list_models(self, request: Request) -> Response:
        api = OpenAIApi()
        if not api.authorized(request.headers, self.api_key):
            error = api.error("unauthorized", _INVALID_KEY)
            return JSONResponse(error.body, error.status)
        models = [{"id": name, "object": "model"} for name in self._models or ("fake",)]
        return JSONResponse({"object": "list", "data": models})


async def _stream(
    api: ProviderApi, turn: Turn, reply: FakeReply, broken: BrokenStream | None
) -> AsyncIterator[bytes]:
    yield api.first_events(reply)
    for event in api.content_events(reply):
        yield event
        if turn.pace:
            await asyncio.sleep(turn.pace)
    if turn.hang:
        await asyncio.Event().wait()
    if broken is None:
        yield api.last_events(reply)
    elif broken.fault == "error":
        yield api.error_event(broken.kind, "Overloaded")
    elif broken.fault == "garbage":
        yield b'event: message\ndata: {"type": \xff\xfe oops\n\n'
    elif broken.fault == "cut":
        raise CutConnection


def _half_response(body: bytes) -> ChunkedResponse:
    async def chunks() -> AsyncIterator[bytes]:
        yield body[:-20]
        raise CutConnection

    headers = {"content-type": "application/json", "content-length": str(len(body))}
    return ChunkedResponse(chunks(), headers=headers)


async def _resolve(item: ScriptItem, request: ModelRequest) -> Turn | Fault:
    value: ScriptValue = await call_if_function(item, request)
    if isinstance(value, ErrorResponse | BrokenStream | RawBody):
        return value
    turn = as_turn(value)
    if turn.error is None:
        return turn
    kind = _ERROR_KINDS.get(type(turn.error), "internal")
    if turn.parts:
        return BrokenStream(turn, "error", kind)
    return ErrorResponse(kind, str(turn.error))


def _path_with_query(request: Request) -> str:
    path, query = request.scope["path"], request.scope["query_string"].decode()
    return f"{path}?{query}" if query else str(path)


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
