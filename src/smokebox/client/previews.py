"""Previews within an ASGI app of one's own, at names that lead to that.

async def app(scope, receive, send):
    preview = proxy_to_sandbox(scope)
    await (preview or site)(scope, receive, send)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from smokebox.client.client import default_client
from smokebox.wire.preview import parse_label

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping

    from smokebox.client.client import Client
    from smokebox.wire.preview import Target

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_CONNECT_SECONDS = 10.0
_NOT_SENT = frozenset(
    (
        b"host",
        b"connection",
        b"expect",
        b"forwarded",
        b"proxy-authorization",
        b"sec-websocket-extensions",
        b"sec-websocket-key",
        b"sec-websocket-protocol",
        b"sec-websocket-version",
        b"transfer-encoding",
        b"upgrade",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
    )
)
_NOT_ANSWERED = frozenset((b"transfer-encoding", b"connection"))
_BAD_GATEWAY = b"the server of the sandboxes does not answer\n"
_BAD_REQUEST = b"the target of a request begins with a slash\n"
# As much as uvicorn takes at once from the other side.
_LONGEST_MESSAGE = 1 << 24


def proxy_to_sandbox(scope: MutableMapping[str, Any], client: Client | None = None) -> App | None:
    """The app that answers a request for a preview; None for a request for something else.

    What counts is the first label of the name that is asked by: `{port}-{id}-{token}`. All
    names below one of yours must lead to your app. `client` is by default that of
    `get_sandbox`.
    """
    if scope["type"] not in ("http", "websocket"):
        return None
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    label, dot, _ = host.partition(".")
    target = parse_label(label) if dot else None
    return None if target is None else _Proxy(client or default_client(), target, host)


class _Proxy:
    """Passes one request on to the server of a client."""

    def __init__(self, client: Client, target: Target, host: str) -> None:
        self._client = client
        self._target = target
        self._host = host

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        transport = self._client._transport
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        if not path.startswith(b"/"):
            # Behind our address it would name another one: http://ours@theirs/.
            await _refuse(scope, receive, send)
            return
        if query := scope.get("query_string"):
            path += b"?" + query
        url = URL(transport.address.base + path.decode("latin-1"), encoded=True)
        connector = (await transport.connections.pool()).connector
        async with aiohttp.ClientSession(
            connector=connector,
            connector_owner=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 18,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
        ) as session:
            relay = self._connect if scope["type"] == "websocket" else self._ask
            await relay(session, url, scope, receive, send)

    def _headers(self, scope: MutableMapping[str, Any]) -> CIMultiDict[str]:
        dropped = _NOT_SENT
        if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
            # Who served us has read the body by that, and a length may say otherwise.
            dropped = _NOT_SENT | {b"content-length"}
        headers = CIMultiDict(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in dropped
        )
        headers["host"] = f"{self._target.label}.localhost"
        # Believed by the server, to whom we show its key, or talk by its own socket.
        headers["x-forwarded-host"] = self._host
        scheme = scope.get("scheme", "http")
        headers["x-forwarded-proto"] = {"ws": "http", "wss": "https"}.get(scheme, scheme)
        if client := scope.get("client"):
            headers["x-forwarded-for"] = client[0]
        if key := self._client._transport.connections.authorization:
            headers["proxy-authorization"] = key
        return headers

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        names = {name for name, _ in scope["headers"]}
        body = _Body(receive, whole=not names & {b"content-length", b"transfer-encoding"})

        async def relay() -> None:
            async with session.request(
                scope["method"],
                url,
                headers=self._headers(scope),
                data=None if body.whole.is_set() else body.pieces(),
                allow_redirects=False,
            ) as answer:
                headers = [
                    (name.lower(), value)
                    for name, value in answer.raw_headers
                    if name.lower() not in _NOT_ANSWERED
                ]
                start = {"status": answer.status, "headers": headers}
                await send({"type": "http.response.start", **start})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body"})

        tasks = [asyncio.create_task(relay()), asyncio.create_task(body.left())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        except aiohttp.ClientConnectionError:
            # Once the answer has begun this is refused, and whoever serves us breaks off.
            await _answer(send, 502, _BAD_GATEWAY)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _connect(
        self,
        session: aiohttp.ClientSession,
        url: URL,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
    ) -> None:
        await receive()
        try:
            socket = await session.ws_connect(
                url,
                headers=self._headers(scope),
                protocols=scope.get("subprotocols") or (),
                max_msg_size=_LONGEST_MESSAGE,
            )
        except aiohttp.ClientError:
            # An answer of 403, all that ASGI has for one that is refused.
            await send({"type": "websocket.close", "code": 1008})
            return
        async with socket:
            await send({"type": "websocket.accept", "subprotocol": socket.protocol})
            tasks = [
                asyncio.create_task(_outwards(socket, send)),
                asyncio.create_task(_inwards(socket, receive)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


class _Body:
    """The body of a request, and whether who sent it is still there."""

    def __init__(self, receive: Receive, *, whole: bool) -> None:
        self.whole = asyncio.Event()
        self._receive = receive
        if whole:
            self.whole.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """It, as it comes."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise aiohttp.ClientConnectionError("who asked has left")
            if data := message.get("body"):
                yield data
            more = message.get("more_body", False)
        self.whole.set()

    async def left(self) -> None:
        """Wait until who asked has left."""
        await self.whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def _refuse(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, 400, _BAD_REQUEST)


async def _answer(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def _outwards(socket: aiohttp.ClientWebSocketResponse, send: Send) -> None:
    async for message in socket:
        if message.type is aiohttp.WSMsgType.TEXT:
            await send({"type": "websocket.send", "text": message.data})
        elif message.type is aiohttp.WSMsgType.BINARY:
            await send({"type": "websocket.send", "bytes": message.data})
    code = socket.close_code
    # What stands for a close without a code may not be sent.
    await send({"type": "websocket.close", "code": 1000 if code in (None, 1005, 1006) else code})


async def _inwards(socket: aiohttp.ClientWebSocketResponse, receive: Receive) -> None:
    while (message := await receive())["type"] == "websocket.receive":
        if (data := message.get("bytes")) is not None:
            await socket.send_bytes(data)
        else:
            await socket.send_str(message["text"])
