"""Responses to the program in the sandbox: of a server, of a handler, or of the proxy itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias

from smokebox.engine.egress.http.upstream import UpstreamResponse
from smokebox.foundation.http1.body import BodyWriter, relay_body
from smokebox.foundation.http1.connection import (
    HIGH_WATER,
    Connection,
    ConnectionLost,
    relay_both,
    relay_bytes,
)
from smokebox.foundation.http1.head import Fields, has_no_body, write_response

if TYPE_CHECKING:
    from smokebox.egress.scrub import Scrubber

Count: TypeAlias = Callable[[int], None]

_MAX_REASON = 500
# An open WebSocket sends a ping now and then.
_WEBSOCKET_SECONDS = 3600.0
_LENGTH_BYTES = {126: 2, 127: 8}


@dataclass(slots=True, kw_only=True)
class ProxyReply:
    """A response to the program. `length` is the size of a body that has not arrived, if known."""

    status: int
    reason: str
    fields: Fields
    body: bytes | UpstreamResponse | AsyncIterable[bytes] = b""
    length: int | None = None
    scrubber: Scrubber | None = field(default=None, repr=False)

    async def write(
        self, connection: Connection, method: str, *, keep_alive: bool, http11: bool, count: Count
    ) -> bool:
        """Send it, and return whether the connection can have another request."""
        fields = self.scrubbed_fields()
        chunked = False
        if has_no_body(method, self.status):
            self.body = b""
        elif isinstance(self.body, bytes):
            fields.append(("content-length", str(len(self.body))))
        elif self.length is not None:
            fields.append(("content-length", str(self.length)))
        elif http11:
            chunked = True
            fields.append(("transfer-encoding", "chunked"))
        else:
            keep_alive = False
        if not keep_alive:
            fields.append(("connection", "close"))
        elif not http11:
            fields.append(("connection", "keep-alive"))
        reason = self.scrubber.text(self.reason) if self.scrubber else self.reason
        head = write_response(self.status, reason, fields)
        await self._write_body(BodyWriter(connection, head, chunked=chunked), count)
        return keep_alive

    async def _write_body(self, writer: BodyWriter, count: Count) -> None:
        def scrub(piece: bytes, last: bool) -> bytes:
            count(len(piece))
            scrubber = self.scrubber
            if scrubber is None:
                return piece
            clean = scrubber.feed(piece)
            return clean + scrubber.finish() if last else clean

        if isinstance(self.body, bytes):
            await writer.finish(scrub(self.body, True))
        elif isinstance(self.body, UpstreamResponse):
            await relay_body(self.body, writer, scrub)
        else:
            writer.flush()
            async for piece in self.body:
                await writer.write(scrub(piece, False))
            await writer.finish(scrub(b"", True))

    def scrubbed_fields(self) -> Fields:
        """Return the headers without secrets."""
        scrubber = self.scrubber
        if scrubber is None or not scrubber.finds_in(itertools.chain.from_iterable(self.fields)):
            return list(self.fields)
        # The replacement of a secret is not valid in a name.
        clean = [field for field in self.fields if scrubber.text(field[0]) == field[0]]
        return [(name, scrubber.text(value)) for name, value in clean]


def explain(
    status: int, why: str, *, rule: str = "", accept: str = "", fields: Fields | None = None
) -> ProxyReply:
    """Return the proxy's own response: why a request failed, and the rule that says so."""
    why = why[:_MAX_REASON]
    if "application/json" in accept.lower():
        kind, text = "application/json", json.dumps({"error": {"message": why, "rule": rule}})
    else:
        kind, text = "text/plain; charset=utf-8", f"smokebox: {why}\n"
    sent: Fields = [("content-type", kind), *(fields or [])]
    if rule:
        sent.append(("x-smokebox-refused", rule.encode("ascii", "backslashreplace").decode()))
    return ProxyReply(status=status, reason=reason_phrase(status), fields=sent, body=text.encode())


def reason_phrase(status: int) -> str:
    """Return the standard phrase of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


async def relay_websocket(
    program: Connection,
    server: Connection,
    scrubber: Scrubber | None,
    *,
    sent: Count,
    received: Count,
) -> None:
    """Pass the bytes of a WebSocket both ways, without secrets towards the program."""
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
    """Return the last piece of a scrubbed frame; the pieces before it are sent.

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
