"""TCP connections into a sandbox, carried by a WebSocket of the API."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox import wire
from smokebox.client.answering import Refused
from smokebox.errors import ServiceUnavailable
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, error_of
from smokebox.wire.frames import LARGEST_FRAME, EndFrame, ErrorFrame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.client.handle import Handle
    from smokebox.client.socket import Socket

_PIECE = min(1 << 16, LARGEST_FRAME)


async def carry(sandbox: Handle, port: int, sock: socket.socket) -> None:
    """Connect a socket with a port of a sandbox, until either has ended.

    Raises `ServiceUnavailable` where nothing listens.
    """
    path = f"/ports/{port}/connection"
    try:
        async with sandbox._socket(path, heartbeat=wire.SILENCE / 2) as line:
            await _both(line, sock)
    except Refused as error:
        # A refusal has no body here: ask again in a way that has.
        await sandbox._ask(msgspec.Raw, "GET", "/ports")
        raise ServiceUnavailable(
            f"port {port} of sandbox {sandbox.id} cannot be connected to: {error}.",
            hint="Is it a port from 1 to 65535? Is there a proxy that does not know WebSockets?",
            service="server",
        ) from error


@contextlib.asynccontextmanager
async def tunnel(
    sandbox: Handle, port: int
) -> AsyncIterator[tuple[socket.socket, asyncio.Task[None]]]:
    """A socket that leads to a port of a sandbox, and the task that carries it there."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    carrying = asyncio.create_task(carry(sandbox, port, far))
    carrying.add_done_callback(lambda _: far.close())
    try:
        yield near, carrying
    finally:
        near.close()
        carrying.cancel()
        await asyncio.wait([carrying])
        if not carrying.cancelled():
            carrying.exception()


async def _both(line: Socket, sock: socket.socket) -> None:
    sending = asyncio.create_task(_send(line, sock))
    try:
        await _receive(line, sock)
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()


async def _send(line: Socket, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(sock, _PIECE):
            await line.send(data)
    except OSError:
        # Who is here left rudely: so is who is there.
        await line.aclose()
        return
    await line.send(_END)


async def _receive(line: Socket, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async for message in line:
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


_FRAMES: Any = EndFrame | ErrorFrame
_END = msgspec.json.encode(EndFrame()).decode()
