"""The bridge protocol: what OpenAI's Agents SDK asks a Cloudflare Sandbox, answered here.

Here are its routes, and the border where its answers differ from those of the native API.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from smokebox.errors import ServiceUnavailable, SmokeboxError
from smokebox.server.call import Call
from smokebox.server.compat import (
    archives,
    exec,
    files,
    mounts,
    openapi,
    pool,
    pty,
    sandboxes,
    tunnels,
)
from smokebox.server.compat.ids import ID
from smokebox.server.compat.refusal import Refusal, refusal_of, translated
from smokebox.wire.failure import FailureAnswer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from smokebox.server.state import State

PREFIX = "/v1"
HEALTH = "/health"
_SANDBOX = f"{PREFIX}/sandbox/"

Handler = Callable[[Call], Awaitable[Response]]


def routes() -> list[BaseRoute]:
    """Every route of the protocol but /health, which is for whoever asks."""
    one = f"{_SANDBOX}{{id}}"
    return [
        _route("POST", f"{one}/exec", exec.run),
        _route("GET", f"{one}/file/{{path:path}}", files.read),
        _route("PUT", f"{one}/file/{{path:path}}", files.write),
        _route("GET", f"{one}/running", sandboxes.running),
        WebSocketRoute(f"{one}/pty", pty.serve),
        _route("GET", f"{one}/pty", pty.refuse_plain),
        _route("POST", f"{PREFIX}/sandbox", sandboxes.create),
        _route("DELETE", one, sandboxes.destroy),
        _route("POST", f"{one}/persist", archives.persist),
        _route("POST", f"{one}/hydrate", archives.hydrate),
        _route("POST", f"{one}/session", sandboxes.create_session),
        _route("DELETE", f"{one}/session/{{sid}}", sandboxes.delete_session),
        _route("POST", f"{one}/mount", mounts.mount),
        _route("POST", f"{one}/unmount", mounts.unmount),
        _route("POST", f"{one}/tunnel/{{port}}", tunnels.create),
        _route("DELETE", f"{one}/tunnel/{{port}}", tunnels.delete),
        _route("GET", f"{PREFIX}/pool/stats", pool.stats),
        _route("POST", f"{PREFIX}/pool/prime", pool.prime),
        _route("POST", f"{PREFIX}/pool/shutdown-prewarmed", pool.shut_down),
        _route("GET", f"{PREFIX}/openapi.json", openapi.document),
        _route("GET", f"{PREFIX}/openapi.html", openapi.page),
        _route("GET", f"{PREFIX}/openapi", openapi.page),
    ]


def _route(method: str, path: str, handler: Handler) -> Route:
    async def answer(request: Request) -> Response:
        scope = request.scope
        call = Call(request, scope["smokebox.state"], scope["smokebox.principal"])
        try:
            return await handler(call)
        except Refusal as refusal:
            return refusal.response
        except SmokeboxError as error:
            return refusal_of(error).response

    route = Route(path, answer, methods=[method], include_in_schema=False)
    # The name of a file may have line breaks.
    route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
    return route


class Border:
    """An ASGI app around the door: before it on the way in, after it on the way out.

    An id that cannot be one is refused before a key is asked for, a key may be where this
    protocol has it, and what the door refuses is told as this protocol tells it.
    """

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        path = scope.get("path", "")
        if path == HEALTH and scope["type"] == "http":
            await (await self._health())(scope, receive, send)
        elif path.startswith(f"{PREFIX}/"):
            await self._cross(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _cross(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(_SANDBOX):
            id = path.removeprefix(_SANDBOX).partition("/")[0]
            if not ID.fullmatch(id):
                refusal = Refusal(400, "Invalid sandbox ID format")
                await refusal.response(scope, receive, send)
                return
        if path.startswith(f"{PREFIX}/openapi"):
            openapi.take_token(scope)
        await self._app(scope, receive, _Translated(send))

    async def _health(self) -> Response:
        try:
            await self._state.health.check(self._state)
        except ServiceUnavailable as error:
            return JSONResponse({"ok": False, "errors": [str(error)]}, 503)
        return JSONResponse({"ok": True})


class _Translated:
    """Sends an answer on; an error of the native API becomes one of this protocol."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        kind = message["type"].removeprefix("websocket.")
        if kind == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif kind == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                start, self._start = self._start, None
                await self._refuse(start, message)
        else:
            await self._send(message)

    async def _refuse(self, start: Message, end: Message) -> None:
        body = self._body
        with contextlib.suppress(msgspec.DecodeError):
            failure = msgspec.json.decode(body, type=FailureAnswer).error
            refusal = translated(failure, start["status"])
            start["status"], body = refusal.status, refusal.body
            start["headers"] = [
                (name, b"%d" % len(body) if name == b"content-length" else value)
                for name, value in start["headers"]
            ]
        await self._send(start)
        await self._send({**end, "body": body})
