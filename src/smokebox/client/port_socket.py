"""Connections to a port of a sandbox, exposed or not: raw TCP and WebSockets.

Both are carried by a WebSocket of the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any, Self

import msgspec

from smokebox import wire
from smokebox.client.http_client import WebSocketRefused
from smokebox.errors import InvalidOption, ServiceUnavailable
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, error_of
from smokebox.wire.frames import LARGEST_FRAME, EndFrame, ErrorFrame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from websockets.asyncio.client import ClientConnection

    from smokebox.client.http_client import ApiWebSocket
    from smokebox.client.sandbox_connection import SandboxConnection

_CHUNK = min(1 << 16, LARGEST_FRAME)
_OPEN_SECONDS = 30.0
_FRAMES: Any = EndFrame | ErrorFrame
_END = msgspec.json.encode(EndFrame()).decode()


class WebSocket:
    """A WebSocket to a server in a sandbox; `Sandbox.ws_connect` opens it.

    Messages are str for text and bytes for binary. Iteration ends when it is closed.
    """

    def __init__(self, inner: ClientConnection, stack: contextlib.AsyncExitStack) -> None:
        self._inner = inner
        self._stack = stack

    @property
    def subprotocol(self) -> str | None:
        """The subprotocol that both sides agreed on."""
        return self._inner.subprotocol

    async def send(self, message: str | bytes) -> None:
        """Send a message: str as text, bytes as binary.

        Raises:
            ServiceUnavailable: It is closed.
        """
        with _closed_as_error():
            await self._inner.send(message)

    async def recv(self) -> str | bytes:
        """Return the next message.

        Raises:
            ServiceUnavailable: It is closed.
        """
        with _closed_as_error():
            return await self._inner.recv()

    async def aclose(self) -> None:
        """Close it. Safe to repeat."""
        await self._stack.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str | bytes:
        try:
            return await self.recv()
        except ServiceUnavailable:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def open_websocket(
    connection: SandboxConnection,
    port: int,
    path: str,
    *,
    headers: Mapping[str, str] | None,
    subprotocols: Sequence[str] | None,
) -> WebSocket:
    """Open a WebSocket; see `Sandbox.ws_connect`."""
    # Importing it takes half as long as the rest of the SDK.
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException
    from websockets.typing import Subprotocol

    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise InvalidOption(
            f"port is a whole number from 1 to 65535, not {port!r:.80}.",
            hint="Pass for example port=8080.",
            option="port",
            value=port,
        )
    if not path.startswith("/"):
        raise InvalidOption(
            f"path begins with a slash, unlike {path!r:.80}.",
            hint=f"Pass path='/{path}'.",
            option="path",
            value=path,
        )
    async with contextlib.AsyncExitStack() as stack:
        sock, copying = await stack.enter_async_context(tunnel(connection, port))
        try:
            inner = await connect(
                f"ws://localhost:{port}{path}",
                sock=sock,
                additional_headers=dict(headers or {}),
                subprotocols=[Subprotocol(one) for one in subprotocols or ()] or None,
                open_timeout=_OPEN_SECONDS,
                max_size=None,
                proxy=None,
            )
        except (OSError, EOFError, WebSocketException) as error:
            if copying.done() and not copying.cancelled():
                copying.result()
            raise ServiceUnavailable(
                f"port {port} of sandbox {connection.id} does not accept a WebSocket at {path}: "
                f"{error}.",
                hint="Check the path, and the log of the server that listens there.",
                service="port",
            ) from error
        stack.push_async_callback(inner.close)
        return WebSocket(inner, stack.pop_all())


async def forward_socket(connection: SandboxConnection, port: int, sock: socket.socket) -> None:
    """Copy between a socket and a port of a sandbox until either side ends.

    Raises:
        ServiceUnavailable: Nothing listens on the port.
    """
    path = f"/ports/{port}/connection"
    try:
        async with connection.websocket(path, heartbeat=wire.SILENCE / 2) as websocket:
            await _copy_both_ways(websocket, sock)
    except WebSocketRefused as error:
        # The refusal of a WebSocket has no body: a plain request raises the reason.
        await connection.request(msgspec.Raw, "GET", "/ports")
        raise ServiceUnavailable(
            f"port {port} of sandbox {connection.id} cannot be connected to: {error}.",
            hint="Check the port number, and that proxies on the way support WebSockets.",
            service="server",
        ) from error


@contextlib.asynccontextmanager
async def tunnel(
    connection: SandboxConnection, port: int
) -> AsyncIterator[tuple[socket.socket, asyncio.Task[None]]]:
    """Yield a socket to a port of a sandbox, and the task that copies its data."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    copying = asyncio.create_task(forward_socket(connection, port, far))
    copying.add_done_callback(lambda _: far.close())
    try:
        yield near, copying
    finally:
        near.close()
        copying.cancel()
        await asyncio.wait([copying])
        if not copying.cancelled():
            copying.exception()


async def _copy_both_ways(websocket: ApiWebSocket, sock: socket.socket) -> None:
    sending = asyncio.create_task(_send(websocket, sock))
    try:
        await _receive(websocket, sock)
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()


async def _send(websocket: ApiWebSocket, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(sock, _CHUNK):
            await websocket.send(data)
    except OSError:
        # The local side was reset: close the remote side too.
        await websocket.aclose()
        return
    await websocket.send(_END)


async def _receive(websocket: ApiWebSocket, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async for message in websocket:
        if isinstance(message, bytes):
            try:
                await loop.sock_sendall(sock, message)
            except OSError:
                return
        else:
            frame = _frame(message)
            if isinstance(frame, ErrorFrame):
                raise error_of(Failure(code=frame.code, message=frame.message))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)


def _frame(text: str) -> EndFrame | ErrorFrame:
    frame: EndFrame | ErrorFrame = decode(_FRAMES, text.encode())
    return frame


@contextlib.contextmanager
def _closed_as_error() -> Iterator[None]:
    from websockets.exceptions import ConnectionClosed

    try:
        yield
    except ConnectionClosed as error:
        raise ServiceUnavailable(
            f"the WebSocket is closed: {error}.",
            hint="Connect again with ws_connect().",
            service="port",
            reason="closed",
        ) from error
