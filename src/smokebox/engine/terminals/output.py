"""The output of a terminal: read at the pace of its viewers, and replayed to new ones."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType


REPLAY_SIZE = 256 << 10
# Bytes per second to read while there is no viewer: the program continues, and the event loop
# has time for other work.
UNWATCHED_RATE = 8 << 20
# The program has to wait once the most advanced viewer is further behind than this.
_MAX_BEHIND = REPLAY_SIZE // 2
_READ = 1 << 16
_BURST_SECONDS = 0.1


class ReplayBuffer:
    """A ring buffer of the last bytes of the output. Positions count from its beginning."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._data = bytearray()
        self.end = 0

    @property
    def start(self) -> int:
        """The position of the oldest byte that is still here."""
        return self.end - len(self._data)

    def add(self, data: bytes) -> None:
        """Append bytes."""
        rest = memoryview(data)
        while rest:
            offset = self.end % self._size
            piece = rest[: self._size - offset]
            # Until the ring is full, its end is that of the array, which grows.
            self._data[offset : offset + len(piece)] = piece
            self.end += len(piece)
            rest = rest[len(piece) :]

    def read(self, position: int, size: int) -> bytes:
        """Return up to `size` bytes from a position that is not before `start`."""
        count = min(size, self.end - position)
        offset = position % self._size
        found = bytes(self._data[offset : offset + count])
        return found + bytes(self._data[: count - len(found)])


class TerminalOutput:
    """Reads a non-blocking descriptor into a ring buffer, and wakes viewers.

    With viewers it reads no further than the ring holds for the most advanced one, which thus
    misses nothing; without, it reads everything. It reads at most `rate` bytes per second.
    `ended` is set at the end of the output, with the `error` that ended it, if any.
    """

    def __init__(self, fd: int, rate: int | None = None) -> None:
        self.replay = ReplayBuffer(REPLAY_SIZE)
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self._fd = fd
        self._rate = rate
        self._next_read = 0.0
        self._rate_timer: asyncio.TimerHandle | None = None
        self._views: set[OutputView] = set()
        self._reading = False
        self._at_end = False
        self._finishing = False
        self._draining = False
        # Bytes to read at most after the program has ended.
        self._drain_left = REPLAY_SIZE

    def finish(self, *, has_end: bool) -> None:
        """End the output after the rest is read: the program has ended.

        Without `has_end`, other processes may continue to write, so only the output that is
        available now counts.
        """
        self._finishing, self._draining = True, not has_end
        self._read()

    def stop(self, error: Exception | None = None) -> None:
        """Stop reading. Safe to repeat."""
        if self.ended.is_set():
            return
        self.error = error
        self._pause()
        if self._rate_timer is not None:
            self._rate_timer.cancel()
        self.ended.set()
        self._wake_viewers()

    def add_view(self, view: OutputView) -> None:
        """Add a viewer."""
        self._views.add(view)

    def remove_view(self, view: OutputView) -> None:
        """Remove a viewer."""
        self._views.discard(view)
        self.resume()

    def resume(self) -> None:
        """Start or continue to read, unless the viewers are too far behind."""
        waits = self._rate_timer is not None or self._at_end or self._viewers_behind()
        if self._reading or waits or self.ended.is_set():
            return
        if self._draining:
            self._read()
        else:
            self._reading = True
            asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        """Read for one iteration of the event loop."""
        start, limit = self.replay.end, self._read_limit()
        while (count := self.replay.end - start) < limit:
            if self._viewers_behind():
                self._pause()
                break
            if self.ended.is_set() or not self._read_once(limit - count):
                break
        else:
            if self._draining:
                asyncio.get_running_loop().call_soon(self._read)
        self._wake_viewers()
        if not self._draining and not self.ended.is_set():
            self._limit_rate(count)

    def _read_once(self, size: int) -> bool:
        """Return False if there is no output now, or at its end."""
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            if self._draining:
                self.stop()
            return False
        except OSError:
            # EIO: the other end is closed.
            data = b""
        self.replay.add(data)
        if self._draining:
            self._drain_left -= len(data)
        if not data:
            self._at_end = True
            self._pause()
        if self._drain_left <= 0 or (self._at_end and self._finishing):
            self.stop()
        return bool(data)

    def _read_limit(self) -> int:
        # At most the output of a tenth of a second, so that slow output is smooth.
        return _READ if self._rate is None or self._draining else min(_READ, self._rate // 10 or 1)

    def _limit_rate(self, count: int) -> None:
        rate = self._rate if self._views else min(self._rate or UNWATCHED_RATE, UNWATCHED_RATE)
        if rate is None or self._rate_timer is not None:
            return
        loop = asyncio.get_running_loop()
        self._next_read = max(self._next_read, loop.time() - _BURST_SECONDS) + count / rate
        if (delay := self._next_read - loop.time()) > 0:
            self._pause()
            self._rate_timer = loop.call_later(delay, self._rate_timer_expired)

    def _rate_timer_expired(self) -> None:
        self._rate_timer = None
        self.resume()

    def _viewers_behind(self) -> bool:
        if not self._views:
            return False
        return self.replay.end - max(view.position for view in self._views) > _MAX_BEHIND

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._fd)

    def _wake_viewers(self) -> None:
        for view in self._views:
            view.changed.set()


class OutputView:
    """The output of a terminal as bytes, from `async for` inside of `async with`.

    Yields the kept output first, unless `replay` is False, then new output until the program has
    ended. Raises `SandboxGone` if the sandbox ended first. An open view keeps the sandbox awake.

    The program waits for the fastest of several viewers. A viewer that falls behind the ring buffer
    continues with the oldest byte in it, and `lost` counts the bytes that it missed.
    """

    def __init__(
        self,
        output: TerminalOutput,
        hold: Callable[[], AbstractAsyncContextManager[None]],
        *,
        replay: bool,
    ) -> None:
        self.lost = 0
        self.position = 0
        self.changed = asyncio.Event()
        self._output = output
        self._held = hold()
        self._replay = replay

    async def __aenter__(self) -> Self:
        # Before the sandbox is held: output that is written meanwhile is not missed.
        replay = self._output.replay
        self.position = replay.start if self._replay else replay.end
        self._output.add_view(self)
        try:
            await self._held.__aenter__()
        except BaseException:
            self._output.remove_view(self)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._output.remove_view(self)
        return await self._held.__aexit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        replay = self._output.replay
        while self.position == replay.end:
            if self._output.ended.is_set():
                if self._output.error is not None:
                    raise self._output.error
                raise StopAsyncIteration
            self.changed.clear()
            await self.changed.wait()
        if self.position < replay.start:
            self.lost += replay.start - self.position
            self.position = replay.start
        data = replay.read(self.position, _READ)
        self.position += len(data)
        self._output.resume()
        return data
