"""Answers that are streams of events, with signs of life while nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import StreamingResponse

from smokebox.errors import SmokeboxError
from smokebox.wire import HEARTBEAT, sse
from smokebox.wire.failure import failure_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from smokebox.server.call import Call

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventResponse(StreamingResponse):
    """Server-sent events. A caller who leaves closes their source.

    The source gives encoded events. An error that it raises is the last event.
    """

    def __init__(self, call: Call, source: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_alive(call, source), headers=_HEADERS)
        # Set here, as Starlette would add a charset: the format has but one.
        self.headers["content-type"] = sse.MEDIA


def event(name: str, value: object, id: str | None = None) -> bytes:
    """An event whose data is a value as JSON."""
    return sse.encode(name, msgspec.json.encode(value), id)


async def _alive(call: Call, source: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait((pending,), timeout=HEARTBEAT)
            if not done:
                yield sse.HEARTBEAT
                continue
            finished, pending = pending, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
            except SmokeboxError as error:
                yield event("error", failure_of(error, call.request_id))
                return
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, SmokeboxError):
                await pending
        await source.aclose()
