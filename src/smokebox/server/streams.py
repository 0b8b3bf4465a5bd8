"""Bytes of any amount, out of the server and into it, in constant memory."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from smokebox.errors import DeadlineExceeded, SmokeboxError
from smokebox.server.patience import left_by

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Mapping

    from starlette.types import Receive, Scope, Send

    from smokebox.server.call import Call

T = TypeVar("T")

# Up to here bytes are read, sent and written at once.
SMALL = 1 << 20
# Seconds in which a client neither sends nor takes a byte, after which it is given up: it
# would keep a file open, and its sandbox awake, for ever.
STALLED = 300.0


class ByteResponse(Response):
    """Bytes as a source gives them, which is closed at the end, and when the client leaves.

    The answer begins with the first piece, so an error before it is answered as any other.
    One after it breaks the connection off, as does a source that gives less than `size`: no
    client takes a part for the whole. `first` is a piece that the source gave already.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        first: bytes = b"",
        size: int | None = None,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = status
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)
        if size is not None:
            self.headers["content-length"] = str(size)
        self._source = source
        self._first = first
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, unless the client leaves."""
        sending = asyncio.ensure_future(self._send_all(send))
        left = asyncio.ensure_future(left_by(receive))
        try:
            await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientDisconnect
            sending.result()
        finally:
            left.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sending
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        piece: bytes | None = self._first or await anext(self._source, None)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        sent = 0
        while piece is not None:
            async with _patience("took"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += len(piece)
            piece = await anext(self._source, None)
        if self._size is not None and sent < self._size:
            raise SmokeboxError(
                f"what is sent was cut short: {sent} of {self._size} bytes are there.",
                hint="Read it again.",
            )
        await send({"type": "http.response.body", "body": b""})


async def batches(call: Call) -> AsyncGenerator[bytes, None]:
    """The body of a request in pieces of more than `SMALL` bytes, but for the last.

    A first piece that is not longer is thus the whole body. A client that leaves before the
    end raises `ClientDisconnect`, so that nobody takes a part for the whole.
    """
    pieces: list[bytes] = []
    size = 0
    async with contextlib.aclosing(call.pieces()) as stream:
        while (piece := await _next(stream)) is not None:
            pieces.append(piece)
            size += len(piece)
            if size > SMALL:
                yield b"".join(pieces)
                pieces, size = [], 0
        if pieces:
            yield b"".join(pieces)


async def unless_left(call: Call, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; cancelled, with `ClientDisconnect`, when the client leaves before.

    For requests without a body.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(left_by(call.request.receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _next(stream: AsyncGenerator[bytes, None]) -> bytes | None:
    async with _patience("sent"):
        return await anext(stream, None)


@contextlib.asynccontextmanager
async def _patience(what: str) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(STALLED):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"the client {what} nothing for {STALLED:g} s.",
            hint="Send it again.",
            operation="transfer",
            timeout=STALLED,
        ) from None
