"""One address of the server: a request is read, looked up in the script, and answered."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web

from smokebox.agents.model import ModelRequest
from smokebox.errors import ContextOverflow, ModelRefused, ModelUnavailable
from smokebox.testing.fake.dialect import Rejected
from smokebox.testing.faults import Broken, Fault, Raw, Refusal
from smokebox.testing.turns import Answer, Turn, as_turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.testing.fake.dialect import Dialect, Parsed, Reply, Trouble
    from smokebox.testing.fake.server import FakeModelServer

Written: TypeAlias = Answer | Fault
Scripted: TypeAlias = Written | Callable[[ModelRequest], Written | Awaitable[Written]]
"""What can be in a script: turns, faults, and functions that make either of a request."""

_TROUBLES: dict[type[Exception], Trouble] = {
    ModelUnavailable: "overloaded",
    ContextOverflow: "too_long",
    ModelRefused: "invalid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request for a turn. `request` is what it was understood as, None if it was rejected."""

    dialect: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    request: ModelRequest | None
    status: int


class Endpoint:
    """Answers requests of one dialect."""

    def __init__(self, server: FakeModelServer, name: str, dialect: Dialect) -> None:
        self._server = server
        self._name = name
        self._dialect = dialect

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        exchange = _Exchange(self._name, request, _object(raw))
        try:
            parsed = self._read(exchange)
            number, written_down = self._server.next_turn(parsed.request)
            answer = await _resolve(written_down, parsed.request)
        except Rejected as rejected:
            return self._refuse(exchange, Refusal(rejected.trouble, rejected.message))
        if isinstance(answer, Refusal):
            return self._refuse(exchange, answer, parsed)
        if isinstance(answer, Raw):
            self._server.received.append(exchange.received(parsed, answer.status))
            return web.Response(
                body=answer.body, status=answer.status, content_type=answer.content_type
            )
        self._server.received.append(exchange.received(parsed, 200))
        turn, ending = (answer.turn, answer) if isinstance(answer, Broken) else (answer, None)
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

    def _read(self, exchange: _Exchange) -> Parsed:
        headers = lower_headers(exchange.request)
        if not self._dialect.authorized(headers, self._server.api_key):
            raise Rejected("Incorrect API key provided.", "unauthorized")
        parsed = self._dialect.parse(exchange.body, headers)
        self._server.check(parsed)
        return parsed

    def _refuse(
        self, exchange: _Exchange, refusal: Refusal, parsed: Parsed | None = None
    ) -> web.Response:
        failure = self._dialect.failure(refusal.trouble, refusal.message)
        status = refusal.status or failure.status
        self._server.received.append(exchange.received(parsed, status))
        return web.json_response(failure.body, status=status, headers=refusal.headers)

    async def _stream(
        self, request: web.Request, turn: Turn, reply: Reply, broken: Broken | None
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
class _Exchange:
    """A request that is being answered."""

    dialect: str
    request: web.Request
    body: dict[str, Any]

    def received(self, parsed: Parsed | None, status: int) -> Received:
        return Received(
            dialect=self.dialect,
            path=self.request.path_qs,
            headers=lower_headers(self.request),
            body=self.body,
            request=parsed.request if parsed else None,
            status=status,
        )


async def _resolve(answer: Scripted, request: ModelRequest) -> Turn | Fault:
    if callable(answer):
        made = answer(request)
        answer = await made if inspect.isawaitable(made) else made
    if isinstance(answer, Refusal | Broken | Raw):
        return answer
    turn = as_turn(answer)
    if turn.error is None:
        return turn
    trouble = _TROUBLES.get(type(turn.error), "broken")
    return Broken(turn, "error", trouble) if turn.parts else Refusal(trouble, str(turn.error))


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
