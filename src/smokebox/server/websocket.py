"""WebSocket endpoints of the API, and the protocol class that detects lost clients.

`@websocket("/sandboxes/{id}/terminal")` on `async def view(call, channel, query: OpenTerminal)`
does for a WebSocket what `@endpoint` does for a method. Until the function accepts the channel, an
error is an HTTP response; after that it is a frame, and the socket is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.websockets import WebSocket
from uvicorn.protocols.utils import ClientDisconnected
from websockets.http11 import Request as UpgradeRequest

from smokebox.errors import InvalidOption, SmokeboxError
from smokebox.server.endpoint import ApiCall, decode_query
from smokebox.tenancy.http_protocol import CountedWebSocketProtocol
from smokebox.tenancy.peer import PEER, Peer
from smokebox.tenancy.scopes import WRITE
from smokebox.wire.codec import decode
from smokebox.wire.frames import ErrorFrame, Frame

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive, Scope, Send
    from uvicorn._types import ASGISendEvent

    from smokebox.tenancy.connections import ConnectionLimits

F = TypeVar("F", bound=Frame)
Handler = Callable[..., Awaitable[None]]


class WebSocketChannel:
    """The server's end of a WebSocket."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.accepted = False
        self._socket = WebSocket(scope, receive, send)
        self._lost: asyncio.Event = scope.get(LOST) or asyncio.Event()

    async def accept(self) -> None:
        """Accept the connection. From here on errors are frames."""
        await self._socket.accept()
        self.accepted = True

    async def send(self, frame: Frame | bytes) -> None:
        """Send a frame, after waiting until most earlier ones have been received."""
        if isinstance(frame, bytes):
            await self._socket.send_bytes(frame)
        else:
            await self._socket.send_text(msgspec.json.encode(frame).decode())

    async def send_error(self, error: SmokeboxError) -> None:
        """Send an error frame."""
        await self.send(ErrorFrame(message=str(error), code=error.code))

    async def run(
        self,
        sender: Coroutine[None, None, None],
        receive: Callable[[bytes | str], Awaitable[None]],
    ) -> None:
        """Run `sender` and pass frames to `receive` until `sender` ends or the client disconnects.

        The next frame is read once `receive` returns. For an invalid frame an error frame is
        sent, and the connection stays open.
        """
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(sender),
            asyncio.create_task(self._receive_all(receive)),
            asyncio.create_task(self._lost.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[0] in done:
            await self._socket.close()

    async def _receive_all(self, receive: Callable[[bytes | str], Awaitable[None]]) -> None:
        while (message := await self._socket.receive())["type"] == "websocket.receive":
            data: bytes | str | None = message.get("bytes")
            try:
                await receive(data if data is not None else message["text"])
            except SmokeboxError as error:
                await self.send_error(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketEndpoint:
    """The WebSocket of one path; an ASGI app behind the request guard."""

    path: str
    handler: Handler
    query: type | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket. The request guard responds to errors before it is accepted."""
        request = Request({**scope, "type": "http", "method": "GET"})
        call = ApiCall(request, scope["smokebox.state"], scope["smokebox.principal"])
        # Each of them takes input.
        call.principal.check_scope(f"sandboxes:{WRITE}")
        arguments: dict[str, Any] = {}
        if self.query is not None:
            arguments["query"] = decode_query(self.query, scope["query_string"])
        await call.find_sandbox()
        channel = WebSocketChannel(scope, receive, send)
        try:
            await self.handler(call, channel, **arguments)
        except SmokeboxError as error:
            if channel.accepted:
                await channel.send_error(error)
            raise


def websocket(path: str) -> Callable[[Handler], WebSocketEndpoint]:
    """Make a function a `WebSocketEndpoint`. Its docstring describes its frames."""

    def make(handler: Handler) -> WebSocketEndpoint:
        query = get_type_hints(handler).get("query")
        return WebSocketEndpoint(path=path, handler=handler, query=query)

    return make


def decode_frame(kind: type[F], text: str) -> F:
    """Decode a text frame of type `kind`."""
    data, expected = text.encode(), str(kind.__struct_config__.tag)
    try:
        # Checked separately: msgspec accepts a frame without a type.
        if (found := decode(_TypedFrame, data).type) != expected:
            raise _invalid_frame(expected, f"not {found!r:.80}")
        return decode(kind, data)
    except msgspec.MsgspecError as error:
        raise _invalid_frame(expected, str(error)) from error


class _TypedFrame(msgspec.Struct):
    type: str


def _invalid_frame(expected: str, problem: str) -> InvalidOption:
    return InvalidOption(
        f"text frames of this socket have the type {expected!r}: {problem}.",
        hint="Send bytes as binary frames.",
        option="frame",
    )


PING_SECONDS = 20.0
PONG_SECONDS = 20.0
# Key in the scope of the event that is set when the connection is lost.
LOST = "smokebox.lost"

_NOT_TEXT = 1007


class WebSocketProtocol(CountedWebSocketProtocol):
    """uvicorn's protocol, with detection of lost clients while a handler pauses reading.

    While a handler does not take received frames, nothing is read from the socket, neither pongs
    nor its end. TCP_USER_TIMEOUT then detects a lost client, and an event in the scope reports it.

    Args:
        limits: Where the connection is counted until it is closed.
    """

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            milliseconds = round((PING_SECONDS + PONG_SECONDS) * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def handle_connect(self, event: UpgradeRequest) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            scope = cast("dict[str, Any]", self.scope)
            scope[LOST], scope[PEER] = self._lost, Peer(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self.close_sent:
            # The protocol closed it because of an invalid frame; uvicorn would blame the handler.
            raise ClientDisconnected
        await super().send(message)

    def keepalive_timeout(self) -> None:
        if not self.read_paused:
            super().keepalive_timeout()
            return
        self.pong_timer = None
        self.pending_ping_payload = None
        self.schedule_ping()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not _is_text(self.frames):
            # uvicorn would log a traceback.
            self.frames = []
            self.conn.fail(_NOT_TEXT, "text that is not UTF-8")
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()


def _is_text(frames: list[bytes]) -> bool:
    try:
        b"".join(frames).decode()
    except UnicodeDecodeError:
        return False
    return True
