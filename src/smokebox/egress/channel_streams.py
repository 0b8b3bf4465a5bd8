"""Bodies that share the handler channel: each is sent only as fast as its reader pulls it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from smokebox.wire.handlers import (
    LARGEST_PIECE,
    BrokenFrame,
    Piece,
    PullFrame,
    StopFrame,
    StreamFrame,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine

    from smokebox.wire.frames import Frame

    Send: TypeAlias = Callable[[Frame | bytes], Awaitable[None]]

WINDOW = 512 * 1024
"""Maximum bytes of one body in flight."""

_Key: TypeAlias = tuple[int, int]


class ChannelStreams:
    """The bodies of one channel in both directions, by request id and stream number."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._outgoing: dict[_Key, _OutgoingStream] = {}
        self._incoming: dict[_Key, _IncomingStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, id: int, stream: int, body: AsyncIterable[bytes]) -> None:
        """Let the peer pull a body."""
        self._outgoing[id, stream] = _OutgoingStream(id, stream, body, self._send)

    def open(self, id: int, stream: int) -> AsyncIterator[bytes]:
        """Return a body of the peer, which is pulled as it is read."""
        incoming = self._incoming[id, stream] = _IncomingStream(id, stream, self._send)
        return self._read(incoming)

    def receive(self, frame: StreamFrame | Piece) -> None:
        """Handle a frame of the peer about a stream. Frames of closed streams are ignored."""
        key = (frame.id, frame.stream)
        if isinstance(frame, PullFrame):
            outgoing = self._outgoing.get(key)
            if outgoing is not None and outgoing.allow(frame.size):
                self.spawn(self._pump(key, outgoing))
        elif isinstance(frame, StopFrame):
            if (stopped := self._outgoing.pop(key, None)) is not None:
                stopped.cancel()
        elif (incoming := self._incoming.get(key)) is not None:
            if isinstance(frame, BrokenFrame):
                incoming.end(ConnectionError(frame.reason))
            else:
                incoming.feed(frame.data)

    def drop(self, id: int) -> None:
        """Close the streams of a request; readers of them get an error."""
        for key in [key for key in self._outgoing if key[0] == id]:
            self._outgoing.pop(key).cancel()
        for key in [key for key in self._incoming if key[0] == id]:
            self._incoming.pop(key).end(ConnectionError("the request is over"))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that ends with the channel at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self, reason: str) -> None:
        """Close all streams, because the channel is closed."""
        self._outgoing.clear()
        for incoming in self._incoming.values():
            incoming.end(ConnectionError(reason))
        self._incoming.clear()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _pump(self, key: _Key, outgoing: _OutgoingStream) -> None:
        try:
            await outgoing.pump()
        finally:
            self._outgoing.pop(key, None)

    async def _read(self, incoming: _IncomingStream) -> AsyncIterator[bytes]:
        try:
            while (piece := await incoming.read()) is not None:
                yield piece
        finally:
            key = (incoming.id, incoming.stream)
            if self._incoming.get(key) is incoming:
                del self._incoming[key]
                if not incoming.ended:
                    self.spawn(self._stop(*key))

    async def _stop(self, id: int, stream: int) -> None:
        with contextlib.suppress(ConnectionError):
            await self._send(StopFrame(id=id, stream=stream))


class _OutgoingStream:
    """A body that is sent in pieces, as far as the peer allows."""

    def __init__(self, id: int, stream: int, body: AsyncIterable[bytes], send: Send) -> None:
        self._id = id
        self._stream = stream
        self._body = body
        self._send = send
        self._allowed = 0
        self._changed = asyncio.Event()
        self._started = False
        self._task: asyncio.Task[None] | None = None

    def allow(self, size: int) -> bool:
        """Allow more bytes; return whether it is the first time."""
        self._allowed += max(0, size)
        self._changed.set()
        first, self._started = not self._started, True
        return first

    def cancel(self) -> None:
        """Stop sending."""
        if self._task is not None:
            self._task.cancel()

    async def pump(self) -> None:
        """Send the whole body."""
        self._task = asyncio.current_task()
        try:
            async for data in self._body:
                for start in range(0, len(data), LARGEST_PIECE):
                    await self._send_piece(data[start : start + LARGEST_PIECE])
            await self._send(Piece(self._id, self._stream, b"").pack())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Its message may contain a secret: send the class only.
            reason = f"the body broke off with {type(error).__name__}"
            with contextlib.suppress(ConnectionError):
                await self._send(BrokenFrame(id=self._id, stream=self._stream, reason=reason))

    async def _send_piece(self, data: bytes) -> None:
        while self._allowed <= 0:
            self._changed.clear()
            await self._changed.wait()
        self._allowed -= len(data)
        await self._send(Piece(self._id, self._stream, data).pack())


class _IncomingStream:
    """A body that the peer sends."""

    def __init__(self, id: int, stream: int, send: Send) -> None:
        self.id = id
        self.stream = stream
        self.ended = False
        self._send = send
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        # Bytes that were read since the last pull.
        self._read = 0
        self._started = False
        self._error: ConnectionError | None = None
        self._changed = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Buffer a piece; an empty one is the end."""
        if self.ended:
            return
        if not data:
            self.end(None)
            return
        self._pieces.append(data)
        self._buffered += len(data)
        self._changed.set()
        if self._buffered > 2 * WINDOW + LARGEST_PIECE:
            self.end(ConnectionError("the peer sent more than it was allowed to"))

    def end(self, error: ConnectionError | None) -> None:
        """Accept no more pieces; readers get the error after those that arrived."""
        if not self.ended:
            self.ended, self._error = True, error
            self._changed.set()

    async def read(self) -> bytes | None:
        """Return the next piece, or None after the last."""
        if not self._started:
            self._started = True
            await self._pull(WINDOW)
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        self._buffered -= len(piece)
        self._read += len(piece)
        if self._read >= WINDOW // 2 and not self.ended:
            size, self._read = self._read, 0
            await self._pull(size)
        return piece

    async def _pull(self, size: int) -> None:
        if not self.ended:
            await self._send(PullFrame(id=self.id, stream=self.stream, size=size))
