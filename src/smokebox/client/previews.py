"""Previews served by your own ASGI app, for host names that resolve to it.

async def app(scope, receive, send):
    preview = proxy_to_sandbox(scope)
    await (preview or site)(scope, receive, send)
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smokebox.client.client import default_client
from smokebox.client.http_client import ConnectFailed
from smokebox.foundation.http1.client import ClientRequest, RequestBodyFailed
from smokebox.foundation.http1.head import (
    MalformedMessage,
    find_invalid_field,
    has_no_body,
    write_request,
)
from smokebox.foundation.tasks import run_until_first
from smokebox.wire.preview import parse_label

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping

    from websockets.asyncio.client import ClientConnection

    from smokebox.client.client import Client
    from smokebox.client.http_client import HttpClient
    from smokebox.foundation.http1.head import Fields, Framing
    from smokebox.wire.preview import PreviewTarget

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_CONNECT_SECONDS = 10.0
_NOT_SENT = frozenset(
    b"host connection content-length expect forwarded proxy-authorization sec-websocket-extensions "
    b"sec-websocket-key sec-websocket-protocol sec-websocket-version transfer-encoding upgrade "
    b"x-forwarded-for x-forwarded-host x-forwarded-proto".split()
)
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
_BAD_GATEWAY = b"the sandbox server does not respond\n"
_BAD_TARGET = b"the request target must begin with a slash\n"
_BAD_HEADER = b"the request has an invalid header\n"
# The limit of uvicorn in the other direction.
_MAX_MESSAGE = 1 << 24


def proxy_to_sandbox(scope: MutableMapping[str, Any], client: Client | None = None) -> App | None:
    """Return an app that serves a request for a preview; None for any other request.

    Previews are recognised by the first label of the host name, `ExposedPort.label`, so a
    wildcard DNS record must point to your app. Visitors need the token, as for other previews.

    Args:
        scope: Scope of an ASGI request.
        client: Client of the sandboxes' server, by default that of `get_sandbox`.
    """
    if scope["type"] not in ("http", "websocket"):
        return None
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    label, dot, _ = host.partition(".")
    target = parse_label(label) if dot else None
    return None if target is None else _Proxy(client or default_client(), target, host)


class _Proxy:
    """Forwards one request to the server of a client."""

    def __init__(self, client: Client, target: PreviewTarget, host: str) -> None:
        self._client = client
        self._target = target
        self._host = host

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        if not path.startswith(b"/"):
            # After our address it could name another host: http://ours@theirs/.
            await _refuse(scope, receive, send, _BAD_TARGET)
            return
        if query := scope.get("query_string"):
            path += b"?" + query
        fields = self._fields(scope)
        if find_invalid_field(fields):
            await _refuse(scope, receive, send, _BAD_HEADER)
            return
        base = urlsplit(self._client._transport.address.base).path.encode()
        target = (base + path).decode("latin-1")
        relay = self._relay_socket if scope["type"] == "websocket" else self._relay
        await relay(target, fields, scope, receive, send)

    def _fields(self, scope: MutableMapping[str, Any]) -> Fields:
        fields = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _NOT_SENT
        ]
        # The server trusts these, as the request has its key or came by its unix socket.
        fields.append(("x-forwarded-host", self._host))
        scheme = scope.get("scheme", "http")
        fields.append(("x-forwarded-proto", {"ws": "http", "wss": "https"}.get(scheme, scheme)))
        if client := scope.get("client"):
            fields.append(("x-forwarded-for", client[0]))
        if key := self._client._transport.http_clients.authorization:
            fields.append(("proxy-authorization", key))
        return fields

    @property
    def _server_host(self) -> str:
        return f"{self._target.label}.localhost"

    async def _relay(
        self,
        target: str,
        fields: Fields,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        framing = _framing(scope["headers"])
        body = _AsgiBody(receive, whole=framing is None)
        fields = [("host", self._server_host), *fields]
        if framing == "chunked":
            fields.append(("transfer-encoding", "chunked"))
        elif framing is not None or scope["method"] in _WITH_BODY:
            fields.append(("content-length", str(framing or 0)))
        request = ClientRequest(
            method=scope["method"],
            head=write_request(scope["method"], target, fields),
            body=b"" if framing is None else body.pieces(),
            framing=framing or 0,
        )
        http = await self._client._transport.http_clients.current()
        try:
            await run_until_first(_respond_with(http, request, send), body.disconnected())
        except (ConnectFailed, OSError, MalformedMessage, RequestBodyFailed):
            # If the response has started, the ASGI server refuses this and closes the connection.
            await _respond(send, 502, _BAD_GATEWAY)

    async def _relay_socket(
        self,
        target: str,
        fields: Fields,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

        await receive()
        route = (await self._client._transport.http_clients.current()).connect_options()
        if route.get("ssl") is not None:
            route["server_hostname"] = route["host"]
        scheme = "ws" if route.get("ssl") is None else "wss"
        try:
            socket = await connect(
                f"{scheme}://{self._server_host}{target}",
                additional_headers=fields,
                subprotocols=scope.get("subprotocols") or None,
                user_agent_header=None,
                compression=None,
                proxy=None,
                max_size=_MAX_MESSAGE,
                open_timeout=_CONNECT_SECONDS,
                ping_interval=None,
                **route,
            )
        except (OSError, InvalidHandshake, InvalidURI):
            # Sent as 403, the only refusal that ASGI has.
            await send({"type": "websocket.close", "code": 1008})
            return
        async with socket:
            await send({"type": "websocket.accept", "subprotocol": socket.subprotocol})
            with contextlib.suppress(ConnectionClosed, OSError):
                await run_until_first(_to_client(socket, send), _to_server(socket, receive))


class _AsgiBody:
    """Body of a request, and a wait for the client's disconnection."""

    def __init__(self, receive: Receive, *, whole: bool) -> None:
        self.whole = asyncio.Event()
        self._receive = receive
        if whole:
            self.whole.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client disconnected")
            if data := message.get("body"):
                yield data
            more = message.get("more_body", False)
        self.whole.set()

    async def disconnected(self) -> None:
        """Wait until the client has disconnected."""
        await self.whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _respond_with(http: HttpClient, request: ClientRequest, send: Send) -> None:
    """Send a request, and pass its response on as it arrives."""
    response = await http.forward(request)
    try:
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in response.fields
        ]
        if response.length is not None and not has_no_body(request.method, response.status):
            headers.append((b"content-length", str(response.length).encode()))
        start = {"status": response.status, "headers": headers}
        await send({"type": "http.response.start", **start})
        while not response.done:
            if piece := await response.read():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})
    finally:
        await response.aclose()


def _framing(headers: Iterable[tuple[bytes, bytes]]) -> Framing | None:
    """Return the framing by which the ASGI server read the body; None for no body.

    A length beside `Transfer-Encoding` may contradict it, and is ignored.
    """
    named = dict(headers)
    if b"transfer-encoding" in named:
        return "chunked"
    length = named.get(b"content-length")
    return None if length is None else int(length)


async def _refuse(
    scope: MutableMapping[str, Any], receive: Receive, send: Send, reason: bytes
) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _respond(send, 400, reason)


async def _respond(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def _to_client(socket: ClientConnection, send: Send) -> None:
    async for message in socket:
        kind = "text" if isinstance(message, str) else "bytes"
        await send({"type": "websocket.send", kind: message})
    code = socket.close_code
    # 1005 and 1006 stand for a missing code and must not be sent.
    await send({"type": "websocket.close", "code": 1000 if code in (None, 1005, 1006) else code})


async def _to_server(socket: ClientConnection, receive: Receive) -> None:
    while (message := await receive())["type"] == "websocket.receive":
        data = message.get("bytes")
        await socket.send(message["text"] if data is None else data)
