"""The request guard: every request passes it on the way in, and every response on the way out.

It assigns request ids, refuses foreign hosts and excess requests, authenticates, turns errors into
responses, and logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.websockets import WebSocketDisconnect

from smokebox import __version__
from smokebox.errors import Forbidden, InvalidOption, SmokeboxError, Unauthorized
from smokebox.foundation import sse
from smokebox.foundation.ids import new_id
from smokebox.foundation.loop_shares import pause, run_in
from smokebox.server import request_log
from smokebox.server.responses import event
from smokebox.tenancy.keys import take_authorization
from smokebox.tenancy.peer import PEER
from smokebox.tenancy.principal import ANONYMOUS, LOCAL, current_principal
from smokebox.tenancy.running_requests import RunningRequest
from smokebox.wire import REQUEST_ID, VERSION
from smokebox.wire.failure import Failure, FailureResponse, failure_of, status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.trace import Span
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from smokebox.server.state import ServerState

_REQUEST_ID = re.compile(rb"[\w.-]{1,128}")
_ID_HEADER = REQUEST_ID.encode()
# Status that nginx logs when the client disconnected before the response.
_CLIENT_DISCONNECTED = 499
_log = logging.getLogger("smokebox.server")


class RequestGuard:
    """An ASGI app around another.

    `public` are the paths that need no key. `probes` are served until the server ends; a public
    probe is served under any host name.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        *,
        routes: Sequence[BaseRoute],
        public: frozenset[str],
        probes: frozenset[str],
    ) -> None:
        self.app = app
        self.state = state
        self._routes = routes
        self._public = public
        self._probes = probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        started = time.monotonic()
        headers = dict(scope["headers"])
        sent_id = headers.get(_ID_HEADER, b"")
        request_id = sent_id.decode() if _REQUEST_ID.fullmatch(sent_id) else new_id()
        scope["smokebox.request_id"] = request_id
        scope["smokebox.state"] = state = self.state
        # With an app in the scope, Starlette raises its errors instead of responding itself.
        scope["app"] = self.app
        writer, body = ResponseWriter(scope, send, request_id), _CountedBody(receive)
        if b"content-length" in headers or b"transfer-encoding" in headers:
            receive = body
        span = None
        if state.telemetry is not None:
            span = state.telemetry.begin(scope.get("method", "WS"), headers)
        try:
            await self._handle(scope, headers, receive, writer)
        finally:
            self._record(scope, writer, body.size, time.monotonic() - started, span)

    async def _handle(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, writer: ResponseWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        drain, probe = self.state.drain, scope["path"] in self._probes
        if not probe:
            drain.add(task)
        running = RunningRequest(task)
        try:
            with self._counted(scope):
                await self._check_and_forward(scope, headers, receive, writer, running)
        except SmokeboxError as error:
            await self._refuse(error, receive, writer)
        except HTTPException as error:
            await self._respond_to_http_error(error, scope, receive, writer)
        except (ClientDisconnect, WebSocketDisconnect):
            writer.status = writer.status or _CLIENT_DISCONNECTED
        except asyncio.CancelledError:
            if not (drain.cut or running.ended_by):
                raise
            task.uncancel()
            await self._refuse(running.ended_by or drain.refusal(), receive, writer)
        except RecursionError:
            # JSON of a depth that can be decoded, but not handled.
            _log.warning("request %s to %a is nested too deeply", writer.request_id, scope["path"])
            await self._refuse(_nested_too_deeply(), receive, writer)
        except Exception:
            _log.exception("request %s to %a failed", writer.request_id, scope["path"])
            await writer.fail(receive, _internal_error(writer.request_id), 500)
        finally:
            if not probe:
                drain.remove(task)

    async def _check_and_forward(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        receive: Receive,
        writer: ResponseWriter,
        running: RunningRequest,
    ) -> None:
        state, path = self.state, scope["path"]
        probe = path in self._probes
        by_socket = scope["server"] is None or scope["server"][1] is None
        # Supervisors know the address of a server, not its name.
        if not by_socket and not (probe and path in self._public):
            self._check_host_and_origin(scope, headers, writer)
            if path not in self._public:
                state.hosts.check_site(headers)
        if scope.get("method") == "OPTIONS" and self._is_preflight(headers):
            writer.extra_headers = [*writer.extra_headers, *state.hosts.preflight()]
            await Response(status_code=204)(scope, receive, writer)
            return
        authorization = headers.get(b"authorization")
        if scope["type"] == "websocket":
            authorization = take_authorization(scope) or authorization
        if by_socket:
            principal = LOCAL
        elif path in self._public:
            principal = ANONYMOUS
        else:
            principal = state.keys.principal(authorization, scope.get(PEER))
        scope["smokebox.principal"] = principal
        # The engine asks for it when it creates a sandbox for this request.
        current_principal.set(principal)
        if state.drain.begun and not probe:
            raise state.drain.refusal()
        usage = None if probe else state.rate_limiter.acquire(principal, by_socket=by_socket)
        try:
            with state.running.hold(principal.id, running):
                share = state.host.shares.share(principal.group)
                await run_in(share, self._forward(scope, receive, writer))
        finally:
            if usage is not None:
                usage.end()

    async def _forward(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        await self.app(scope, receive, writer)

    def _counted(self, scope: Scope) -> contextlib.AbstractContextManager[None]:
        """Find the client behind a trusted proxy, and count its request."""
        connections, peer = self.state.connections, scope["client"]
        if peer is None or not connections.is_trusted(peer[0]):
            return contextlib.nullcontext()
        forwarded = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        client = connections.client_of(peer[0], b",".join(forwarded).decode("latin-1"))
        scope["client"] = (client, 0)
        return connections.request(client)

    def _check_host_and_origin(
        self, scope: Scope, headers: dict[bytes, bytes], writer: ResponseWriter
    ) -> None:
        hosts = self.state.hosts
        host = headers.get(b"host", b"")
        hosts.check_host(host)
        if len(headers) != len(scope["headers"]):
            # The dict has only the last value of a repeated header.
            for name, value in scope["headers"]:
                if name == b"host":
                    hosts.check_host(value)
        origin = headers.get(b"origin")
        writer.extra_headers = hosts.headers(origin)
        if origin is not None:
            hosts.check_origin(origin, host)

    def _is_preflight(self, headers: dict[bytes, bytes]) -> bool:
        origin = headers.get(b"origin")
        preflight = b"access-control-request-method" in headers
        return preflight and origin is not None and self.state.hosts.allows(origin)

    def _record(
        self, scope: Scope, writer: ResponseWriter, received: int, seconds: float, span: Span | None
    ) -> None:
        """Count the request, log it, and end its span."""
        state = self.state
        method = scope.get("method", "WS")
        route = getattr(scope.get("route"), "path", "none")
        status = writer.status or _CLIENT_DISCONNECTED
        principal = scope.get("smokebox.principal", ANONYMOUS).id
        state.metrics.count_request(route, method, status, seconds, received, writer.size)
        request_log.log_request(
            writer.request_id, principal, method, route, scope["path"], status, seconds
        )
        if span is not None and state.telemetry is not None:
            state.telemetry.end(
                span,
                method=method,
                route=route,
                status=status,
                principal=principal,
                sandbox=scope.get("path_params", {}).get("id"),
                request_id=writer.request_id,
            )

    async def _refuse(self, error: SmokeboxError, receive: Receive, writer: ResponseWriter) -> None:
        status = status_of(type(error))
        if isinstance(error, (Unauthorized, Forbidden)):
            self.state.metrics.count_refusal(error.fields.get("reason"))
        await writer.fail(receive, failure_of(error, writer.request_id), status)

    async def _respond_to_http_error(
        self, error: HTTPException, scope: Scope, receive: Receive, writer: ResponseWriter
    ) -> None:
        """Respond to an error of Starlette in our format."""
        methods = self._methods(scope) if error.status_code == 405 else []
        failure = Failure(
            code="method_not_allowed" if methods else "http_error",
            message=f"{scope['path']} does not support {scope['method']}."
            if methods
            else f"{error.detail}.",
            hint=f"It supports {', '.join(methods)}." if methods else "See /api/openapi.json.",
            request_id=writer.request_id,
        )
        if methods:
            writer.extra_headers = [*writer.extra_headers, (b"allow", ", ".join(methods).encode())]
        await writer.fail(receive, failure, error.status_code)

    def _methods(self, scope: Scope) -> list[str]:
        """Return the methods that the path of a request supports."""
        found: set[str] = set()
        for route in self._routes:
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
                found |= set(route.methods or ())
        return sorted(found)


class _CountedBody:
    """Forwards the body of a request, and counts its bytes."""

    __slots__ = ("_receive", "size")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.size = 0

    async def __call__(self) -> Message:
        await pause()
        message = await self._receive()
        self.size += len(message.get("body", b""))
        return message


def _nested_too_deeply() -> InvalidOption:
    return InvalidOption(
        "a value in this request is nested too deeply.",
        hint="See /api/openapi.json for its fields.",
        option="the body",
    )


def _internal_error(request_id: str) -> Failure:
    return Failure(
        code="internal",
        message="internal error: this is a bug in Smokebox.",
        hint=f"See the server's log for request id {request_id}.",
        request_id=request_id,
    )


_JSON = b"application/json"
_VERSION = (VERSION.encode(), __version__.encode())
_WS_REFUSED, _WS_INTERNAL_ERROR, _WS_RESTART = 1008, 1011, 1012
_LONGEST_WS_REASON = 123
# Seconds to send an error to a client that may not be reading.
_ERROR_SECONDS = 1.0


class ResponseWriter:
    """Sends a response with additional headers, and tracks its progress.

    `size` is the number of bytes of the body sent so far.
    """

    __slots__ = (
        "_blank",
        "_headers",
        "_scope",
        "_send",
        "_started",
        "complete",
        "extra_headers",
        "request_id",
        "size",
        "status",
    )

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0
        self.size = 0
        self.complete = False
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self._scope = scope
        self._send = send
        self._started = False
        self._blank = True
        self._headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, message: Message) -> None:
        """Send one message of the response."""
        kind = message["type"]
        if kind == "http.response.body":
            body = message.get("body", b"")
            self.size += len(body)
            if not message.get("more_body", False):
                self.complete = True
            elif self._blank:
                self._blank = not body.strip()
        elif kind in ("http.response.start", "websocket.http.response.start"):
            self._started = True
            self.status = message["status"]
            self._headers = message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
                _VERSION,
                *self.extra_headers,
            ]
        elif kind == "websocket.accept":
            self._started = True
            self.status = 101
        elif kind == "websocket.send":
            self.size += len(message.get("bytes") or message.get("text") or b"")
        elif kind == "websocket.close":
            self._started = self.complete = True
            self.status = self.status or 403
        await self._send(message)
        if message.get("more_body") or kind == "websocket.send":
            await pause()

    async def fail(self, receive: Receive, failure: Failure, status: int) -> None:
        """Respond with an error.

        Once the response has begun, an event stream gets the error as its last event, and JSON
        of which only whitespace was sent gets it as its body. Any other response stays
        incomplete: the server closes the connection, so that clients notice.
        """
        if not self._started:
            await self._refuse(receive, failure, status)
        elif not self.complete:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_ERROR_SECONDS):
                    await self._append_error(failure, status)

    async def _refuse(self, receive: Receive, failure: Failure, status: int) -> None:
        headers: dict[str, str] = {}
        if status == 401:
            sent = failure.fields.get("reason") not in ("missing", "peer")
            headers["www-authenticate"] = 'Bearer error="invalid_token"' if sent else "Bearer"
        if status in (429, 503):
            wait = float(failure.fields.get("retry_after") or 1)
            headers["retry-after"] = str(math.ceil(wait))
        if failure.fields.get("reason") == "draining":
            headers["connection"] = "close"
        body = msgspec.json.encode(FailureResponse(failure))
        response = Response(body, status, headers, media_type="application/json")
        await response(self._scope, receive, self)

    async def _append_error(self, failure: Failure, status: int) -> None:
        if self._scope["type"] == "websocket":
            code = {503: _WS_RESTART, 500: _WS_INTERNAL_ERROR}.get(status, _WS_REFUSED)
            reason = failure.message.encode()[:_LONGEST_WS_REASON].decode(errors="ignore")
            await self({"type": "websocket.close", "code": code, "reason": reason})
            return
        headers = dict(self._headers)
        media = headers.get(b"content-type", b"").partition(b";")[0]
        if media == sse.MEDIA.encode():
            await self(_last_chunk(event("error", failure)))
        elif media == _JSON and self._blank and b"content-length" not in headers:
            await self(_last_chunk(msgspec.json.encode(FailureResponse(failure))))


def _last_chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body}
