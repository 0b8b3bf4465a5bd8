"""A connection that became a WebSocket: bytes both ways, until either side leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox.engine.egress.http.wire import Cut, Wire

if TYPE_CHECKING:
    from smokebox.egress.scrub import Scrubber
    from smokebox.engine.egress.http.reply import Count

_PIECE = 128 * 1024
# Whoever keeps a WebSocket open sends a ping now and then.
_PATIENCE = 3600.0
_LENGTH_BYTES = {126: 2, 127: 8}


async def pass_both(
    client: Wire, server: Wire, scrubber: Scrubber | None, *, sent: Count, received: Count
) -> None:
    """Pass what either side says to the other."""
    client.patience = server.patience = _PATIENCE
    ways = (
        asyncio.create_task(_pass(client, server, None, sent)),
        asyncio.create_task(_pass(server, client, scrubber, received)),
    )
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    for way in done:
        way.result()


async def _pass(source: Wire, sink: Wire, scrubber: Scrubber | None, count: Count) -> None:
    try:
        while True:
            if scrubber is None:
                piece = await source.some(_PIECE)
            else:
                piece = await _frame(source, scrubber, sink, count)
            if not piece:
                return
            count(len(piece))
            sink.write(piece)
            await sink.drain()
    except (Cut, TimeoutError):
        return


async def _frame(source: Wire, scrubber: Scrubber, sink: Wire, count: Count) -> bytes:
    """A frame without the secrets: all but its last piece is sent here, that is returned.

    Its end is shown at its end: a message must not wait for the next.
    """
    begin = await source.some(1)
    if not begin:
        return b""
    begin += await source.exactly(1)
    short = begin[1] & 0x7F
    begin += await source.exactly(_LENGTH_BYTES.get(short, 0) + (4 if begin[1] & 0x80 else 0))
    left = int.from_bytes(begin[2 : 2 + _LENGTH_BYTES[short]]) if short > 125 else short
    while left:
        piece = await source.some(min(left, _PIECE))
        if not piece:
            raise Cut("the server left in the middle of a frame")
        left -= len(piece)
        begin += scrubber.feed(piece)
        if left:
            count(len(begin))
            sink.write(begin)
            await sink.drain()
            begin = b""
    return begin + scrubber.finish()
