"""Ports of a sandbox: preview URLs, and connections through the API."""

from __future__ import annotations

import asyncio
import math
import socket
import time

from smokebox.engine.names import check_port
from smokebox.errors import (
    Conflict,
    InvalidOption,
    LimitReached,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.previews import urls
from smokebox.server.websocket import WebSocketChannel, decode_frame, websocket
from smokebox.types import ExposedPort
from smokebox.wire.frames import EndFrame
from smokebox.wire.requests import CheckToken, ExposePort, MakePreviewUrl
from smokebox.wire.responses import Ports, PreviewUrl, TokenCheck

_CHUNK_SIZE = 1 << 18
_WAKE_ERRORS = (InvalidOption, Conflict, LimitReached, SandboxGone, Unsupported)


@endpoint("GET", "/sandboxes/{id}/ports")
async def list_all(call: ApiCall) -> Ports:
    """List the exposed ports, in the order in which they were exposed."""
    return Ports([await urls.exposed_port(call, port) for port in await call.sandbox.ports.list()])


@endpoint("POST", "/sandboxes/{id}/ports", errors=_WAKE_ERRORS, slow=True)
async def expose(call: ApiCall, body: ExposePort) -> ExposedPort:
    """Expose a port at a URL for the current run. Wakes the sandbox.

    The URL alone grants access, unless the port is private. It stays the same when the sandbox
    sleeps, and then responds with 410 until the port is exposed in a later run. Safe to repeat.
    """
    exposed = await call.sandbox.ports.expose(
        body.port, name=body.name, token=body.token, private=body.private
    )
    return await urls.exposed_port(call, exposed)


@endpoint("DELETE", "/sandboxes/{id}/ports/{port}", errors=(InvalidOption,))
async def unexpose(call: ApiCall) -> None:
    """Stop exposing a port, and close the connections to it. Safe to repeat."""
    await call.sandbox.ports.unexpose(_port(call))


@endpoint("POST", "/sandboxes/{id}/ports/{port}/url", errors=_WAKE_ERRORS, slow=True)
async def make_url(call: ApiCall, body: MakePreviewUrl) -> PreviewUrl:
    """Return the URL of a port, which is exposed if needed.

    A URL that expires also grants access to a private port.
    """
    port = _port(call)
    await call.sandbox.ports.expose(port)
    if body.expires_in is None:
        return PreviewUrl(await urls.preview_url(call, port))
    expires_at = math.ceil(time.time() + body.expires_in)
    return PreviewUrl(await urls.preview_url(call, port, expires_at=expires_at), expires_at)


@endpoint("POST", "/sandboxes/{id}/ports/{port}/check", errors=(InvalidOption,), reads=True)
async def check(call: ApiCall, body: CheckToken) -> TokenCheck:
    """Check the token of a port. The port need not be active."""
    return TokenCheck(await call.sandbox.ports.validate_token(_port(call), body.token))


@websocket("/sandboxes/{id}/ports/{port}/connection")
async def connect(call: ApiCall, channel: WebSocketChannel) -> None:
    """Connect to a port, exposed or not. Wakes the sandbox.

    Binary frames are the data of the connection. Each side sends `end` after its last data;
    the socket closes once both have. If nothing listens on the port, it closes after an error.
    """
    port = _port(call)
    async with call.sandbox.lifecycle.use() as run:
        await channel.accept()
        with await call.sandbox.ports.dial(run, port) as sock:
            await _relay(channel, sock)


async def _relay(channel: WebSocketChannel, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    async def send() -> None:
        try:
            while data := await loop.sock_recv(sock, _CHUNK_SIZE):
                await channel.send(data)
        except ConnectionError as error:
            raise _connection_lost() from error
        await channel.send(EndFrame())
        await ended.wait()

    async def receive(frame: bytes | str) -> None:
        try:
            if isinstance(frame, bytes):
                await loop.sock_sendall(sock, frame)
            else:
                decode_frame(EndFrame, frame)
                sock.shutdown(socket.SHUT_WR)
                ended.set()
        except OSError as error:
            raise _connection_lost() from error

    await channel.run(send(), receive)


def _connection_lost() -> ServiceUnavailable:
    return ServiceUnavailable(
        "the connection to the port broke.",
        hint="See the log of the program that listens there.",
        service="port",
    )


def _port(call: ApiCall) -> int:
    text = call.path_param("port")
    if not text.isascii() or not text.isdigit() or len(text) > 5:
        raise InvalidOption(
            f"{text!r} is not a port.", hint="Use 1 to 65535.", option="port", value=text
        )
    return check_port(int(text))


ENDPOINTS = [list_all, expose, unexpose, make_url, check]
SOCKETS = [connect]
