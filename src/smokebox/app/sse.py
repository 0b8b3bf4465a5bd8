"""Server-sent events, with a heartbeat while there are none."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from starlette.responses import StreamingResponse

from smokebox.errors import InvalidOption
from smokebox.wire import HEARTBEAT, sse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def wants_events(request: Request) -> bool:
    """Whether who asks wants to hear of events as they come."""
    return sse.MEDIA in request.headers.get("accept", "")


def last_offset(request: Request, default: int = 0) -> int:
    """The offset behind which to go on: of Last-Event-ID, or of the query."""
    text = request.headers.get("last-event-id") or request.query_params.get("offset")
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    raise InvalidOption(
        f"offset is a whole number from 0, not {text!r:.80}.",
        hint="Send the offset of the last event that arrived.",
        option="offset",
        value=text,
    )


def events_response(source: AsyncGenerator[bytes, None]) -> StreamingResponse:
    """Events as they come, until the source ends or the client leaves."""
    return StreamingResponse(with_heartbeat(source), media_type=sse.MEDIA, headers=_HEADERS)


async def with_heartbeat(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """What the source gives, and a comment whenever it gives nothing for long."""
    following: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            if following is None:
                following = asyncio.ensure_future(anext(source, None))
            done, _ = await asyncio.wait([following], timeout=HEARTBEAT)
            if not done:
                yield sse.HEARTBEAT
                continue
            piece, following = following.result(), None
            if piece is None:
                return
            yield piece
    finally:
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await following
        await source.aclose()
