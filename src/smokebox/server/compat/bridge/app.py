"""Routes of the bridge protocol, and the middleware for what differs from the native API."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, WebSocketRoute

from smokebox.errors import ServiceUnavailable
from smokebox.server.compat.bridge import exec, files, mounts, sandboxes, terminal
from smokebox.server.compat.bridge.errors import BridgeError, translate_failure
from smokebox.server.compat.bridge.names import ID
from smokebox.server.compat.bridge.openapi import make_bridge_document
from smokebox.server.compat.bridge.route import Ok, bridge_route
from smokebox.server.endpoint import ApiCall
from smokebox.server.openapi import HEADERS, make_page
from smokebox.wire.failure import FailureResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from smokebox.server.compat.bridge.route import BridgeRoute
    from smokebox.server.state import ServerState

PREFIX = "/v1"
HEALTH = "/health"
_SANDBOX = f"{PREFIX}/sandbox/"


@bridge_route("GET", HEALTH, "healthCheck", errors=(503,), public=True)
async def health(call: ApiCall) -> Ok:
    """Check that the server can accept work. Needs no key."""
    await call.state.health.check(call.state)
    return Ok()


@bridge_route("GET", f"{PREFIX}/openapi.json", "getOpenApiSchema")
async def document(call: ApiCall) -> Response:
    """Return this OpenAPI document."""
    return JSONResponse(_document())


async def _page(call: ApiCall) -> Response:
    """Return the OpenAPI document as a web page."""
    return HTMLResponse(make_page(_document()), headers=HEADERS)


# The most frequent requests first: routes are matched in this order.
_ROUTES: list[BridgeRoute] = [
    exec.run,
    files.read,
    files.write,
    sandboxes.running,
    terminal.refuse_http,
    sandboxes.create,
    sandboxes.destroy,
    files.persist,
    files.hydrate,
    sandboxes.create_session,
    sandboxes.delete_session,
    mounts.mount,
    mounts.unmount,
    sandboxes.create_tunnel,
    sandboxes.delete_tunnel,
    sandboxes.pool_stats,
    sandboxes.prime_pool,
    sandboxes.empty_pool,
    document,
]
# Not in the document, which describes the API for programs.
_PAGES = [
    bridge_route("GET", f"{PREFIX}/{name}", "getOpenApiPage", returns="text/html")(_page)
    for name in ("openapi.html", "openapi")
]


def routes() -> list[BaseRoute]:
    """Return every route but /health, which needs no key and is served by the middleware."""
    return [
        *(route.starlette_route() for route in (*_ROUTES, *_PAGES)),
        WebSocketRoute(terminal.refuse_http.path, terminal.serve),
    ]


@functools.cache
def _document() -> dict[str, Any]:
    return make_bridge_document([health, *_ROUTES])


def _move_token(scope: Scope) -> None:
    """Move a key from `?token=`, which a browser can send, to the Authorization header."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    tokens = [value for name, value in pairs if name == "token"]
    names = {name for name, _ in scope["headers"]}
    if tokens and b"authorization" not in names:
        key = tokens[-1].encode("utf-8", "replace")
        scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key)]
    scope["query_string"] = urlencode([pair for pair in pairs if pair[0] != "token"]).encode()


class BridgeMiddleware:
    """An ASGI app around the request guard.

    It refuses an invalid id before a key is checked, accepts a key in the query, and translates
    the guard's errors to those of this protocol.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or respond to it."""
        path = scope["path"]
        if path == HEALTH and scope["type"] == "http":
            await (await self._health())(scope, receive, send)
        elif path.startswith(f"{PREFIX}/"):
            await self._forward(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(_SANDBOX):
            id = path.removeprefix(_SANDBOX).partition("/")[0]
            if not ID.fullmatch(id):
                refusal = BridgeError(400, "Invalid sandbox ID format")
                await refusal.response(scope, receive, send)
                return
        if path.startswith(f"{PREFIX}/openapi"):
            _move_token(scope)
        await self._app(scope, receive, _ErrorTranslator(send))

    async def _health(self) -> Response:
        try:
            await self._state.health.check(self._state)
        except ServiceUnavailable as error:
            return JSONResponse({"ok": False, "errors": [str(error)]}, 503)
        return JSONResponse({"ok": True})


class _ErrorTranslator:
    """Forwards a response, and translates an error of the native API to this protocol."""

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
                await self._send_error(start, message)
        else:
            await self._send(message)

    async def _send_error(self, start: Message, end: Message) -> None:
        body = self._body
        with contextlib.suppress(msgspec.DecodeError):
            failure = msgspec.json.decode(body, type=FailureResponse).error
            refusal = translate_failure(failure, start["status"])
            start["status"], body = refusal.status, refusal.body
            start["headers"] = [
                (name, b"%d" % len(body) if name == b"content-length" else value)
                for name, value in start["headers"]
            ]
        await self._send(start)
        await self._send({**end, "body": body})
