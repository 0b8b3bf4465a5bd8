"""Responses: bodies of any length in constant memory, event streams, keepalive of slow ones."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from smokebox.errors import DeadlineExceeded, SmokeboxError
from smokebox.foundation import sse
from smokebox.server.json_pieces import encode_pieces, large_fields
from smokebox.wire import HEARTBEAT
from smokebox.wire.failure import failure_of

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Callable,
        Coroutine,
        Mapping,
    )

    from starlette.types import Receive, Scope, Send

    from smokebox.server.endpoint import ApiCall

T = TypeVar("T")

# Bytes. A body up to this length is read, sent and written in one piece.
SMALL = 1 << 20
# A transfer without progress for this long is aborted: a stalled client would keep a file open,
# and its sandbox awake, without limit.
STALL_SECONDS = 300.0


class ByteResponse(Response):
    """A response that streams a source, and closes it at the end or when the client disconnects.

    The status is sent with the first piece, so an earlier error gets an ordinary error response.
    A later error closes the connection, as does a source shorter than `size`, so that a client
    does not take a part for the whole. `first` is a piece already read from the source.
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
        """Send the body, or raise `ClientDisconnect` if the client disconnects."""
        try:
            await cancel_on_disconnect(receive, self._send_all(send))
        finally:
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
            async with _stall_timeout("received"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += len(piece)
            piece = await anext(self._source, None)
        if self._size is not None and sent < self._size:
            raise SmokeboxError(
                f"the source ended after {sent} of {self._size} bytes.",
                hint="Read it again.",
            )
        await send({"type": "http.response.body", "body": b""})


class PiecewiseResponse(Response):
    """A response with a large value as JSON, which is encoded while it is sent."""

    def __init__(self, value: Any, large: Mapping[str, Any], status: int) -> None:
        self.status_code = status
        self.background = None
        self.init_headers({"content-type": "application/json"})
        self._value = value
        self._large = large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await self.send_body(send)

    async def send_body(self, send: Send) -> None:
        """Send the body, and let the loop do other work after each piece."""
        for piece in encode_pieces(self._value, self._large):
            async with _stall_timeout("received"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def json_response(value: Any, status: int) -> Response:
    """Return a response with a value as JSON."""
    if large := large_fields(value):
        return PiecewiseResponse(value, large, status)
    data = msgspec.json.encode(value)
    return Response(data, status_code=status, media_type="application/json")


async def read_batches(call: ApiCall) -> AsyncGenerator[bytes, None]:
    """Yield the body of a request in pieces of more than `SMALL` bytes, except for the last.

    A first piece that is not longer is therefore the whole body. Raises `ClientDisconnect` if
    the client disconnects before the end.
    """
    pieces: list[bytes] = []
    size = 0
    async with contextlib.aclosing(call.chunks()) as stream:
        while True:
            async with _stall_timeout("sent"):
                piece = await anext(stream, None)
            if piece is None:
                break
            pieces.append(piece)
            size += len(piece)
            if size > SMALL:
                yield b"".join(pieces)
                pieces, size = [], 0
        if pieces:
            yield b"".join(pieces)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it and raise `ClientDisconnect`.

    Only for requests whose body was read, or that have none.
    """
    task = asyncio.create_task(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


@contextlib.asynccontextmanager
async def _stall_timeout(verb: str) -> AsyncGenerator[None, None]:
    try:
        async with asyncio.timeout(STALL_SECONDS):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"the client {verb} nothing for {STALL_SECONDS:g} s.",
            hint="Send it again.",
            operation="transfer",
            timeout=STALL_SECONDS,
        ) from None


_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventResponse(StreamingResponse):
    """Server-sent events. The source is closed when the client disconnects.

    The source yields encoded events. An error that it raises becomes the last event.
    """

    def __init__(self, call: ApiCall, source: AsyncGenerator[bytes, None]) -> None:
        events = sse.with_heartbeat(_with_error_event(call, source), HEARTBEAT)
        super().__init__(events, headers=_HEADERS)
        # Set here, as Starlette would add a charset; the format is always UTF-8.
        self.headers["content-type"] = sse.MEDIA


def event(name: str, value: object, id: str | None = None) -> bytes:
    """Encode an event whose data is a value as JSON."""
    return sse.encode(name, msgspec.json.encode(value), id)


async def _with_error_event(
    call: ApiCall, source: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(source):
        try:
            async for encoded in source:
                yield encoded
        except SmokeboxError as error:
            yield event("error", failure_of(error, call.request_id))


async def respond_with_keepalive(
    scope: Scope,
    receive: Receive,
    send: Send,
    work: Coroutine[Any, Any, Any],
    respond: Callable[[Any], Response],
) -> None:
    """Respond with the result of `work`, sending whitespace while it runs.

    JSON may start with whitespace. The first of it sends status 200, so a later error is only in
    the body. `work` is cancelled when the client disconnects.
    """
    task = asyncio.create_task(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await _wait_for_either(task, disconnect)
        if task.done():
            await respond(task.result())(scope, receive, send)
        elif not disconnect.done():
            await _respond_slowly(send, task, disconnect, respond)
    finally:
        disconnect.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _respond_slowly(
    send: Send,
    task: asyncio.Future[Any],
    disconnect: asyncio.Future[None],
    respond: Callable[[Any], Response],
) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while not task.done() and not disconnect.done():
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        await _wait_for_either(task, disconnect)
    if task.done():
        # The request guard appends the error of a task that failed.
        response = respond(task.result())
        if isinstance(response, PiecewiseResponse):
            await response.send_body(send)
        else:
            await send({"type": "http.response.body", "body": response.body})


async def _wait_for_either(*tasks: asyncio.Future[Any]) -> None:
    await asyncio.wait(tasks, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. Only for requests whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
