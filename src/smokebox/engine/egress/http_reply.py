"""Responses of the egress proxy to the program in the sandbox, and WebSockets after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from smokebox.egress.upstream import UpstreamResponse
from smokebox.foundation.http1.body import BodyWriter, relay_body
from smokebox.foundation.http1.connection import (
    HIGH_WATER,
    Connection,
    ConnectionLost,
    relay_both,
    relay_bytes,
)
from smokebox.foundation.http1.head import has_no_body, response_framing, write_response

if TYPE_CHECKING:
    from smokebox.egress.outbound import OutboundResponse
    from smokebox.egress.scrub import Scrubber

Count: TypeAlias = Callable[[int], None]

# An open WebSocket sends a ping now and then.
_WEBSOCKET_SECONDS = 3600.0
_LENGTH_BYTES = {126: 2, 127: 8}


async def write_reply(
    connection: Connection,
    response: OutboundResponse,
    method: str,
    *,
    keep_alive: bool,
    http11: bool,
    count: Count,
) -> bool:
    """Send a response without secrets; return whether the connection can have another request.

    Args:
        method: Method of the request.
        keep_alive: Whether the program can send another request over the connection.
        http11: Whether the program speaks HTTP/1.1.
        count: Called with the size of each piece of the body; may raise to stop.
    """
    if has_no_body(method, response.status):
        response.body = b""
    body = response.body
    length = len(body) if isinstance(body, bytes) else response.length
    framing = response_framing(
        method, response.status, length, keep_alive=keep_alive, http11=http11
    )
    scrubber = response.scrubber
    reason = scrubber.text(response.reason) if scrubber else response.reason
    fields = [*response.scrub_fields(), *framing.fields]
    head = write_response(response.status, reason, fields)
    writer = BodyWriter(connection, head, chunked=framing.chunked)

    def scrub(piece: bytes, last: bool) -> bytes:
        count(len(piece))
        return response.scrub(piece, last)

    if isinstance(body, bytes):
        await writer.finish(scrub(body, True))
    elif isinstance(body, UpstreamResponse):
        await relay_body(body, writer, scrub)
    else:
        writer.flush()
        async for piece in body:
            await writer.write(scrub(piece, False))
        await writer.finish(scrub(b"", True))
    return framing.keep_alive


async def relay_websocket(
    program: Connection,
    server: Connection,
    scrubber: Scrubber | None,
    *,
    sent: Count,
    received: Count,
) -> None:
    """Relay a WebSocket in both directions, without secrets towards the program."""
    program.timeout = server.timeout = _WEBSOCKET_SECONDS
    if scrubber is None:
        back = relay_bytes(server, program, received)
    else:
        back = _relay_frames(server, program, scrubber, received)
    await relay_both(relay_bytes(program, server, sent), back)


async def _relay_frames(
    source: Connection, sink: Connection, scrubber: Scrubber, count: Count
) -> None:
    try:
        while piece := await _next_frame(source, scrubber, sink, count):
            count(len(piece))
            sink.write(piece)
            await sink.drain()
    except (ConnectionLost, TimeoutError):
        return


async def _next_frame(
    source: Connection, scrubber: Scrubber, sink: Connection, count: Count
) -> bytes:
    """Return the last piece of a scrubbed frame, after sending the pieces before it.

    The scrubber is flushed at the end of each frame: a message must not wait for the next.
    """
    frame = await source.read(1)
    if not frame:
        return b""
    frame += await source.read_exactly(1)
    short = frame[1] & 0x7F
    frame += await source.read_exactly(_LENGTH_BYTES.get(short, 0) + (4 if frame[1] & 0x80 else 0))
    remaining = int.from_bytes(frame[2 : 2 + _LENGTH_BYTES[short]]) if short > 125 else short
    while remaining:
        piece = await source.read(min(remaining, HIGH_WATER))
        if not piece:
            raise ConnectionLost("the server closed the connection in the middle of a frame")
        remaining -= len(piece)
        frame += scrubber.feed(piece)
        if remaining:
            count(len(frame))
            sink.write(frame)
            await sink.drain()
            frame = b""
    return frame + scrubber.finish()
