"""Ports of a sandbox: seen from outside by a URL, and connected to by who may ask the API."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from smokebox.engine.names import check_port
from smokebox.errors import (
    Conflict,
    InvalidOption,
    LimitReached,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.previews import urls
from smokebox.server.sockets import Channel, decode_frame, socket
from smokebox.types import ExposedPort
from smokebox.wire.answers import Ports, PreviewUrl, TokenCheck
from smokebox.wire.frames import EndFrame
from smokebox.wire.requests import CheckToken, ExposePort, MakePreviewUrl

if TYPE_CHECKING:
    from socket import socket as Socket

_PIECE = 1 << 18
_WAKING = (InvalidOption, Conflict, LimitReached, SandboxGone, Unsupported)


@endpoint("GET", "/sandboxes/{id}/ports")
async def list_all(call: Call) -> Ports:
    """List the ports that were exposed, in that order."""
    return Ports([await urls.described(call, one) for one in await call.sandbox.ports.list()])


@endpoint("POST", "/sandboxes/{id}/ports", errors=_WAKING, slow=True)
async def expose(call: Call, body: ExposePort) -> ExposedPort:
    """Have a port be seen from outside, in the run that is; wakes the sandbox.

    Whoever has the URL sees it, which stays when the sandbox sleeps and is answered with 410
    then, until the port is exposed in a later run. Safe to repeat.
    """
    exposed = await call.sandbox.ports.expose(
        body.port, name=body.name, token=body.token, private=body.private
    )
    return await urls.described(call, exposed)


@endpoint("DELETE", "/sandboxes/{id}/ports/{port}", errors=(InvalidOption,))
async def unexpose(call: Call) -> None:
    """Have a port not be seen any more, and end the connections to it. Safe to repeat."""
    await call.sandbox.ports.unexpose(_port(call))


@endpoint("POST", "/sandboxes/{id}/ports/{port}/url", errors=_WAKING, slow=True)
async def make_url(call: Call, body: MakePreviewUrl) -> PreviewUrl:
    """The URL of a port, which is exposed if need be.

    One that expires opens a private port, too, for whoever has it.
    """
    port = _port(call)
    await call.sandbox.ports.expose(port)
    if body.expires_in is None:
        return PreviewUrl(await urls.url_of(call, port))
    expires_at = math.ceil(time.time() + body.expires_in)
    return PreviewUrl(await urls.url_of(call, port, expires_at=expires_at), expires_at)


@endpoint("POST", "/sandboxes/{id}/ports/{port}/check", errors=(InvalidOption,))
async def check(call: Call, body: CheckToken) -> TokenCheck:
    """Whether a token opens a port, be that active or not."""
    return TokenCheck(await call.sandbox.ports.validate_token(_port(call), body.token))


@socket("/sandboxes/{id}/ports/{port}/connection")
async def connect(call: Call, channel: Channel) -> None:
    """Connect to a port, exposed or not; wakes the sandbox.

    Binary frames are what goes over the connection. `end` says that a side sends nothing
    more; once both have, the socket closes. It is closed right after an error where nothing
    listens.
    """
    port = _port(call)
    async with call.sandbox.life.use() as run:
        await channel.accept()
        with await call.sandbox.ports.dial(run, port) as sock:
            await _relay(channel, sock)


async def _relay(channel: Channel, sock: Socket) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    async def talk() -> None:
        try:
            while data := await loop.sock_recv(sock, _PIECE):
                await channel.send(data)
        except ConnectionError as error:
            raise _lost() from error
        await channel.send(EndFrame())
        await ended.wait()

    async def hear(frame: bytes | str) -> None:
        try:
            if isinstance(frame, bytes):
                await loop.sock_sendall(sock, frame)
            else:
                decode_frame(EndFrame, frame)
                sock.shutdown(1)
                ended.set()
        except OSError as error:
            raise _lost() from error

    await channel.converse(talk(), hear)


def _lost() -> ServiceUnavailable:
    return ServiceUnavailable(
        "the connection to the port broke.",
        hint="See the log of what listens there.",
        service="port",
    )


def _port(call: Call) -> int:
    text = call.part("port")
    if not text.isascii() or not text.isdigit() or len(text) > 5:
        raise InvalidOption(
            f"{text!r} is not a port.", hint="Use 1 to 65535.", option="port", value=text
        )
    return check_port(int(text))


ENDPOINTS = [list_all, expose, unexpose, make_url, check]
SOCKETS = [connect]
