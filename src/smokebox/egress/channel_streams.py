"""Bodies that share one channel: each is sent as far as its reader has asked for it."""

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
"""How many bytes of one body may be on their way."""

_Key: TypeAlias = tuple[int, int]


class ChannelStreams:
    """The bodies of one channel, both ways, by exchange and number."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent: dict[_Key, _Sent] = {}
        self._taken: dict[_Key, _Taken] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, id: int, stream: int, body: AsyncIterable[bytes]) -> None:
        """Have a body that the other end may pull."""
        self._sent[id, stream] = _Sent(id, stream, body, self._send)

    def take(self, id: int, stream: int) -> AsyncIterator[bytes]:
        """A body that the other end has; nothing is asked before it is read."""
        taken = self._taken[id, stream] = _Taken(id, stream, self._send)
        return self._read(taken)

    def hear(self, frame: StreamFrame | Piece) -> None:
        """Take what the other end says of a stream; of one that is over, nothing."""
        key = (frame.id, frame.stream)
        if isinstance(frame, PullFrame):
            if (sent := self._sent.get(key)) is not None and sent.pull(frame.size):
                self.spawn(self._pump(key, sent))
        elif isinstance(frame, StopFrame):
            if (stopped := self._sent.pop(key, None)) is not None:
                stopped.cancel()
        elif (taken := self._taken.get(key)) is not None:
            if isinstance(frame, BrokenFrame):
                taken.end(ConnectionError(frame.reason))
            else:
                taken.feed(frame.data)

    def drop(self, id: int) -> None:
        """Forget the streams of an exchange; those who still read them get an error."""
        for key in [key for key in self._sent if key[0] == id]:
            self._sent.pop(key).cancel()
        for key in [key for key in self._taken if key[0] == id]:
            self._taken.pop(key).end(ConnectionError("the request is over"))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Have something done, for as long as the channel lives."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self, reason: str) -> None:
        """End all streams: the channel is gone."""
        self._sent.clear()
        for taken in self._taken.values():
            taken.end(ConnectionError(reason))
        self._taken.clear()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _pump(self, key: _Key, sent: _Sent) -> None:
        try:
            await sent.pump()
        finally:
            self._sent.pop(key, None)

    async def _read(self, taken: _Taken) -> AsyncIterator[bytes]:
        try:
            while (piece := await taken.read()) is not None:
                yield piece
        finally:
            key = (taken.id, taken.stream)
            if self._taken.get(key) is taken:
                del self._taken[key]
                if not taken.over:
                    self.spawn(self._stop(*key))

    async def _stop(self, id: int, stream: int) -> None:
        with contextlib.suppress(ConnectionError):
            await self._send(StopFrame(id=id, stream=stream))


class _Sent:
    """A body that is sent, in pieces, while there is leave for them."""

    def __init__(self, id: int, stream: int, body: AsyncIterable[bytes], send: Send) -> None:
        self._id = id
        self._stream = stream
        self._body = body
        self._send = send
        self._leave = 0
        self._news = asyncio.Event()
        self._begun = False
        self._task: asyncio.Task[None] | None = None

    def pull(self, size: int) -> bool:
        """Give leave for so many bytes; whether that is the first."""
        self._leave += max(0, size)
        self._news.set()
        first, self._begun = not self._begun, True
        return first

    def cancel(self) -> None:
        """Send no more."""
        if self._task is not None:
            self._task.cancel()

    async def pump(self) -> None:
        """Send all of it."""
        self._task = asyncio.current_task()
        try:
            async for data in self._body:
                for start in range(0, len(data), LARGEST_PIECE):
                    await self._piece(data[start : start + LARGEST_PIECE])
            await self._send(Piece(self._id, self._stream, b"").pack())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Its words may hold a secret: only its kind is told.
            reason = f"the body broke off with {type(error).__name__}"
            with contextlib.suppress(ConnectionError):
                await self._send(BrokenFrame(id=self._id, stream=self._stream, reason=reason))

    async def _piece(self, data: bytes) -> None:
        while self._leave <= 0:
            self._news.clear()
            await self._news.wait()
        self._leave -= len(data)
        await self._send(Piece(self._id, self._stream, data).pack())


class _Taken:
    """A body that comes from the other end."""

    def __init__(self, id: int, stream: int, send: Send) -> None:
        self.id = id
        self.stream = stream
        self.over = False
        self._send = send
        self._pieces: deque[bytes] = deque()
        self._kept = 0
        self._read = 0
        self._begun = False
        self._error: ConnectionError | None = None
        self._news = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Keep a piece; an empty one is the end."""
        if self.over:
            return
        if not data:
            self.end(None)
            return
        self._pieces.append(data)
        self._kept += len(data)
        self._news.set()
        if self._kept > 2 * WINDOW + LARGEST_PIECE:
            self.end(ConnectionError("more was sent than was asked for"))

    def end(self, error: ConnectionError | None) -> None:
        """There is no more of it."""
        if not self.over:
            self.over, self._error = True, error
            self._news.set()

    async def read(self) -> bytes | None:
        """The next piece; None after the last."""
        if not self._begun:
            self._begun = True
            await self._pull(WINDOW)
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.over:
                return None
            self._news.clear()
            await self._news.wait()
        piece = self._pieces.popleft()
        self._kept -= len(piece)
        self._read += len(piece)
        if self._read >= WINDOW // 2 and not self.over:
            size, self._read = self._read, 0
            await self._pull(size)
        return piece

    async def _pull(self, size: int) -> None:
        if not self.over:
            await self._send(PullFrame(id=self.id, stream=self.stream, size=size))
