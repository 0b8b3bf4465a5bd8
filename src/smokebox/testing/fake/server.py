"""The server itself: sockets, a script, and a memory of what it was asked."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web

from smokebox.agents.messages import Usage
from smokebox.agents.model import ModelRequest
from smokebox.errors import ContextOverflow, ModelRefused, ModelUnavailable
from smokebox.testing.fake.anthropic import AnthropicDialect
from smokebox.testing.fake.dialect import FakeReply, RequestRejected
from smokebox.testing.fake.openai import OpenAIDialect
from smokebox.testing.faults import BrokenStream, ErrorResponse, Fault, RawBody
from smokebox.testing.loopback import LoopbackServer
from smokebox.testing.scripted import (
    Turn,
    TurnLike,
    as_turn,
    estimate_tokens,
    last_text,
    parts_of,
    stop_of,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.testing.fake.dialect import Dialect, ParsedRequest, Trouble


class FakeModelServer(LoopbackServer):
    """Real HTTP on the loopback that speaks Anthropic's Messages and OpenAI's chat completions.

        async with FakeModelServer(call("bash", command="ls"), "One file.") as server:
            model = open_model("openai/gpt", config=server.config)

    Turns are those of `ScriptedModel`, and the faults of `smokebox.testing.faults` besides.
    What the real ones reject is rejected, in their words. `received` has every request.
    `with` instead of `async with` runs it on a thread of its own.

    `context_window` is how many tokens it reads before it says that they are too many, and
    `models` the names that it knows, by default any.
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
        self._asked = itertools.count(1)
        self._cached: set[int] = set()
        self.received: list[ReceivedRequest] = []

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return self._origin

    @property
    def config(self) -> dict[str, dict[str, str]]:
        """What `open_model` takes, so that requests to the providers come here."""
        urls = {"anthropic": "", "openai": "/v1", "openrouter": "/api/v1"}
        return {
            name: {"base_url": self._origin + path, "api_key": self.api_key}
            for name, path in urls.items()
        }

    @property
    def requests(self) -> list[ModelRequest]:
        """What it was asked and did not reject."""
        return [one.request for one in self.received if one.request is not None]

    def routes(self, router: web.UrlDispatcher) -> None:
        """What a proxy of a company does, too: providers are found below any prefix."""
        for path, name, dialect in (
            ("/v1/messages", "anthropic", AnthropicDialect()),
            ("/v1/chat/completions", "openai", OpenAIDialect()),
            ("/api/v1/chat/completions", "openrouter", OpenAIDialect(reasoning=True)),
        ):
            router.add_post(path, ModelEndpoint(self, name, dialect).answer)
        for path in ("/v1/models", "/api/v1/models"):
            router.add_get(path, self._list_models)

    def next_turn(self, request: ModelRequest) -> tuple[int, ScriptItem]:
        """The number of the turn that is asked for, and what is written for it."""
        number = next(self._asked)
        if number <= len(self._script):
            return number, self._script[number - 1]
        if self._then is not None:
            return number, self._then
        # A status that no client tries again: the test is to end, and to say why.
        raise RequestRejected(
            f"the script of FakeModelServer has {len(self._script)} turns, and was asked for turn "
            f"{number}. It was told last: {last_text(request)[:200]!r}. Write one more turn, or "
            "give then= what answers all further requests."
        )

    def reply(self, number: int, turn: Turn, parsed: ParsedRequest) -> FakeReply:
        """A turn as what is answered, with what it takes."""
        parts = parts_of(turn, number=number)
        return FakeReply(
            id=f"msg_{number}",
            model=parsed.model,
            parts=parts,
            stop=stop_of(turn, parts),
            usage=turn.usage or self._usage(parsed, estimate_tokens(written(parts))),
            chunk=self._chunk,
        )

    def check(self, parsed: ParsedRequest) -> None:
        """Reject a model that is not known, and more than it can read."""
        if self._models is not None and parsed.model not in self._models:
            raise RequestRejected(f"model: {parsed.model}", "not_found")
        tokens = sum(map(estimate_tokens, parsed.blocks))
        if self._window is not None and tokens > self._window:
            raise RequestRejected(
                f"prompt is too long: {tokens} tokens > {self._window} maximum. This model's "
                f"maximum context length is {self._window} tokens.",
                "too_long",
            )

    def _usage(self, parsed: ParsedRequest, output: int) -> Usage:
        """As a provider counts that has cached every request up to now."""
        seen, total, cached = 0, 0, 0
        for block in parsed.blocks:
            seen = hash((seen, block))
            total += estimate_tokens(block)
            cached = total if seen in self._cached else cached
        self._cached.add(seen)
        cached = cached if parsed.caches != "no" else 0
        return Usage(
            requests=1,
            input_tokens=total,
            output_tokens=output,
            cache_read_tokens=cached,
            cache_write_tokens=total - cached if parsed.caches == "marked" else 0,
        )

    async def _list_models(self, request: web.Request) -> web.Response:
        if not OpenAIDialect().authorized(lower_headers(request), self.api_key):
            failure = OpenAIDialect().failure("unauthorized", "Incorrect API key provided.")
            return web.json_response(failure.body, status=failure.status)
        listed = [{"id": name, "object": "model"} for name in self._models or ("fake",)]
        return web.json_response({"object": "list", "data": listed})


ScriptValue: TypeAlias = TurnLike | Fault
ScriptItem: TypeAlias = ScriptValue | Callable[[ModelRequest], ScriptValue | Awaitable[ScriptValue]]
"""What can be in a script: turns, faults, and functions that make either of a request."""

_TROUBLES: dict[type[Exception], Trouble] = {
    ModelUnavailable: "overloaded",
    ContextOverflow: "too_long",
    ModelRefused: "invalid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """One request for a turn. `request` is what it was understood as, None if it was rejected."""

    dialect: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    request: ModelRequest | None
    status: int


class ModelEndpoint:
    """Answers requests of one dialect."""

    def __init__(self, server: FakeModelServer, name: str, dialect: Dialect) -> None:
        self._server = server
        self._name = name
        self._dialect = dialect

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        exchange = _PendingRequest(self._name, request, _object(raw))
        try:
            parsed = self._read(exchange)
            number, written_down = self._server.next_turn(parsed.request)
            answer = await _resolve(written_down, parsed.request)
        except RequestRejected as rejected:
            return self._refuse(exchange, ErrorResponse(rejected.trouble, rejected.message))
        if isinstance(answer, ErrorResponse):
            return self._refuse(exchange, answer, parsed)
        if isinstance(answer, RawBody):
            self._server.received.append(exchange.received(parsed, answer.status))
            return web.Response(
                body=answer.body, status=answer.status, content_type=answer.content_type
            )
        self._server.received.append(exchange.received(parsed, 200))
        turn, ending = (answer.turn, answer) if isinstance(answer, BrokenStream) else (answer, None)
        reply = self._server.reply(number, turn, parsed)
        await asyncio.sleep(turn.delay)
        if parsed.stream:
            return await self._stream(request, turn, reply, ending)
        if turn.hang:
            await asyncio.Event().wait()
        if ending is None:
            return web.json_response(self._dialect.whole(reply))
        half = json.dumps(self._dialect.whole(reply)).encode()[:-20]
        return await self._unfinished(request, half)

    def _read(self, exchange: _PendingRequest) -> ParsedRequest:
        headers = lower_headers(exchange.request)
        if not self._dialect.authorized(headers, self._server.api_key):
            raise RequestRejected("Incorrect API key provided.", "unauthorized")
        parsed = self._dialect.parse(exchange.body, headers)
        self._server.check(parsed)
        return parsed

    def _refuse(
        self, exchange: _PendingRequest, refusal: ErrorResponse, parsed: ParsedRequest | None = None
    ) -> web.Response:
        failure = self._dialect.failure(refusal.trouble, refusal.message)
        status = refusal.status or failure.status
        self._server.received.append(exchange.received(parsed, status))
        return web.json_response(failure.body, status=status, headers=refusal.headers)

    async def _stream(
        self, request: web.Request, turn: Turn, reply: FakeReply, broken: BrokenStream | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self._dialect.opening(reply))
        for piece in self._dialect.pieces(reply):
            await response.write(piece)
            if turn.pace:
                await asyncio.sleep(turn.pace)
        if turn.hang:
            await asyncio.Event().wait()
        if broken is None:
            await response.write(self._dialect.closing(reply))
        elif broken.ending == "error":
            await response.write(self._dialect.error_event(broken.trouble, "Overloaded"))
        elif broken.ending == "garbage":
            await response.write(b'event: message\ndata: {"type": \xff\xfe oops\n\n')
        elif broken.ending == "cut":
            _reset(request)
        return response

    async def _unfinished(self, request: web.Request, half: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.content_length = len(half) + 20
        await response.prepare(request)
        await response.write(half)
        _reset(request)
        return response


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    """A request that is being answered."""

    dialect: str
    request: web.Request
    body: dict[str, Any]

    def received(self, parsed: ParsedRequest | None, status: int) -> ReceivedRequest:
        return ReceivedRequest(
            dialect=self.dialect,
            path=self.request.path_qs,
            headers=lower_headers(self.request),
            body=self.body,
            request=parsed.request if parsed else None,
            status=status,
        )


async def _resolve(answer: ScriptItem, request: ModelRequest) -> Turn | Fault:
    if callable(answer):
        made = answer(request)
        answer = await made if inspect.isawaitable(made) else made
    if isinstance(answer, ErrorResponse | BrokenStream | RawBody):
        return answer
    turn = as_turn(answer)
    if turn.error is None:
        return turn
    trouble = _TROUBLES.get(type(turn.error), "broken")
    return (
        BrokenStream(turn, "error", trouble)
        if turn.parts
        else ErrorResponse(trouble, str(turn.error))
    )


def _reset(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def lower_headers(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}
