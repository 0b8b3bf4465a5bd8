"""The door: every request passes it on the way in, and every answer on the way out.

It gives requests their id, refuses those from elsewhere and those that are too many, says
who asks, answers what nobody answered (errors), and writes down what happened.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.websockets import WebSocketDisconnect

from smokebox.errors import Forbidden, SmokeboxError, Unauthorized
from smokebox.server import journal
from smokebox.server.answer import Answer
from smokebox.server.keys import take_authorization
from smokebox.server.principal import LOCAL, NOBODY
from smokebox.wire import REQUEST_ID
from smokebox.wire.failure import Failure, failure_of, status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.trace import Span
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from smokebox.server.state import State

_REQUEST_ID = re.compile(rb"[\w.-]{1,128}")
_ID_HEADER = REQUEST_ID.encode()
# What nginx calls an answer that nobody waited for.
_CALLER_LEFT = 499
_log = logging.getLogger("smokebox.server")


class Door:
    """An ASGI app around another.

    `public` are the paths that nobody needs a key for, `probes` those of them that are
    answered to the very end, to whoever asks by whatever name.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: State,
        *,
        routes: Sequence[BaseRoute] = (),
        public: frozenset[str] = frozenset(),
        probes: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self.state = state
        self._routes = routes
        self._public = public
        self._probes = probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        headers = dict(scope["headers"])
        told = headers.get(_ID_HEADER, b"")
        request_id = told.decode() if _REQUEST_ID.fullmatch(told) else secrets.token_hex(8)
        scope["smokebox.request_id"] = request_id
        scope["smokebox.state"] = state = self.state
        # In an app Starlette raises what it refuses, and does not answer by itself.
        scope["app"] = self.app
        answer, body = Answer(scope, send, request_id), _Body(receive)
        if b"content-length" in headers or b"transfer-encoding" in headers:
            receive = body
        span = None
        if state.telemetry is not None:
            span = state.telemetry.begin(scope.get("method", "WS"), headers)
        try:
            await self._answer(scope, headers, receive, answer)
        finally:
            self._write_down(scope, answer, body.size, time.monotonic() - started, span)

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: Answer
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        drain, probe = self.state.drain, scope["path"] in self._probes
        if not probe:
            drain.enter(task)
        try:
            await self._let_through(scope, headers, receive, answer, probe)
        except SmokeboxError as error:
            await self._refuse(error, receive, answer)
        except HTTPException as error:
            await self._translate(error, scope, receive, answer)
        except (ClientDisconnect, WebSocketDisconnect):
            answer.status = answer.status or _CALLER_LEFT
        except asyncio.CancelledError:
            if not drain.cut:
                raise
            task.uncancel()
            await self._refuse(drain.refusal(), receive, answer)
        except Exception:
            _log.exception("request %s to %a failed", answer.request_id, scope["path"])
            await answer.fail(receive, _defect(answer.request_id), 500)
        finally:
            if not probe:
                drain.leave(task)

    async def _let_through(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        receive: Receive,
        answer: Answer,
        probe: bool,
    ) -> None:
        state, path = self.state, scope["path"]
        by_socket = scope["server"] is None or scope["server"][1] is None
        # Whoever sees to it that a server lives knows its address, not its name.
        if not by_socket and not (probe and path in self._public):
            self._check_page(scope, headers, answer)
        if scope.get("method") == "OPTIONS" and self._is_preflight(headers):
            answer.more = [*answer.more, *state.hosts.preflight()]
            await Response(status_code=204)(scope, receive, answer)
            return
        told = headers.get(b"authorization")
        if scope["type"] == "websocket":
            told = take_authorization(scope) or told
        if by_socket:
            who = LOCAL
        elif path in self._public:
            who = NOBODY
        else:
            who = state.keys.principal(told)
        scope["smokebox.principal"] = who
        if state.drain.begun and not probe:
            raise state.drain.refusal()
        account = None if probe else state.limits.enter(who, by_socket=by_socket)
        try:
            await self.app(scope, receive, answer)
        finally:
            if account is not None:
                state.limits.leave(account)

    def _check_page(self, scope: Scope, headers: dict[bytes, bytes], answer: Answer) -> None:
        hosts = self.state.hosts
        host = headers.get(b"host", b"")
        hosts.check_host(host)
        if len(headers) != len(scope["headers"]):
            # Of a header that is there several times we know the last only.
            for name, value in scope["headers"]:
                if name == b"host":
                    hosts.check_host(value)
        origin = headers.get(b"origin")
        answer.more = hosts.headers(origin)
        if origin is not None:
            hosts.check_origin(origin, host)

    def _is_preflight(self, headers: dict[bytes, bytes]) -> bool:
        origin = headers.get(b"origin")
        asked = b"access-control-request-method" in headers
        return asked and origin is not None and self.state.hosts.allows(origin)

    def _write_down(
        self, scope: Scope, answer: Answer, received: int, seconds: float, span: Span | None
    ) -> None:
        """Count it, log it, and end its span."""
        state = self.state
        method = scope.get("method", "WS")
        route = getattr(scope.get("route"), "path", "none")
        status = answer.status or _CALLER_LEFT
        who = scope.get("smokebox.principal", NOBODY).id
        state.metrics.answered(route, method, status, seconds, received, answer.size)
        journal.request(answer.request_id, who, method, route, scope["path"], status, seconds)
        if span is not None and state.telemetry is not None:
            state.telemetry.end(
                span,
                method=method,
                route=route,
                status=status,
                principal=who,
                sandbox=scope.get("path_params", {}).get("id"),
                request_id=answer.request_id,
            )

    async def _refuse(self, error: SmokeboxError, receive: Receive, answer: Answer) -> None:
        status = status_of(type(error))
        if isinstance(error, (Unauthorized, Forbidden)):
            self.state.metrics.refused(error.fields.get("reason"))
        await answer.fail(receive, failure_of(error, answer.request_id), status)

    async def _translate(
        self, error: HTTPException, scope: Scope, receive: Receive, answer: Answer
    ) -> None:
        """Answer what Starlette refused as we do."""
        methods = self._methods(scope) if error.status_code == 405 else []
        failure = Failure(
            code="method_not_allowed" if methods else "http_error",
            message=f"{scope['method']} does not go with {scope['path']}."
            if methods
            else f"{error.detail}.",
            hint=f"What does: {', '.join(methods)}." if methods else "See /api/openapi.json.",
            request_id=answer.request_id,
        )
        if methods:
            answer.more = [*answer.more, (b"allow", ", ".join(methods).encode())]
        await answer.fail(receive, failure, error.status_code)

    def _methods(self, scope: Scope) -> list[str]:
        """What the path of a request can be asked with."""
        found: set[str] = set()
        for route in self._routes:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                found |= set(route.methods or ())
        return sorted(found)


class _Body:
    """Hands on the body of a request, and counts it."""

    __slots__ = ("_receive", "size")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.size = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self.size += len(message.get("body", b""))
        return message


def _defect(request_id: str) -> Failure:
    return Failure(
        code="internal",
        message="the server failed to answer: this is a defect in Smokebox.",
        hint=f"Its log says more under request id {request_id}.",
        request_id=request_id,
    )
