"""The output of a terminal: read at the pace of its viewers, and replayed to new ones."""

from __future__ import annotations

import asyncio
import os
from asyncio import Event
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType


REPLAY_SIZE = 256 << 10
# Bytes a second that are read while nobody looks: the program goes on, and the engine's
# thread is left to others.
UNWATCHED_RATE = 8 << 20
# So far the viewer that is the most advanced may be behind before the program has to wait.
_FARTHEST_BEHIND = REPLAY_SIZE // 2
_READ = 1 << 16
_BURST_SECONDS = 0.1
_MOST = 1 << 16


class ReplayBuffer:
    """A ring of bytes: what is added last pushes out what was added first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._data = bytearray()
        self.end = 0

    @property
    def start(self) -> int:
        """The position of the oldest byte that is still here."""
        return self.end - len(self._data)

    def add(self, data: bytes) -> None:
        """Put bytes at the end."""
        rest = memoryview(data)
        while rest:
            place = self.end % self._size
            piece = rest[: self._size - place]
            # Until the ring is full, its end is that of the array, which grows.
            self._data[place : place + len(piece)] = piece
            self.end += len(piece)
            rest = rest[len(piece) :]

    def read(self, position: int, most: int) -> bytes:
        """Up to `most` bytes from a position that is not before `start`."""
        count = min(most, self.end - position)
        place = position % self._size
        found = bytes(self._data[place : place + count])
        return found + bytes(self._data[: count - len(found)])


class TerminalOutput:
    """Reads a descriptor that does not block into a ring, and wakes those who look.

    With viewers it reads no further than the ring holds for the most advanced one, so that
    one loses nothing; without, all that comes. It reads at most `rate` bytes a second. `over`
    once there will be no more, with the `fault` that ended it, if any.
    """

    def __init__(self, fd: int, rate: int | None = None) -> None:
        self.replay = ReplayBuffer(REPLAY_SIZE)
        self.over = asyncio.Event()
        self.fault: Exception | None = None
        self._fd = fd
        self._rate = rate
        self._due = 0.0
        self._rest: asyncio.TimerHandle | None = None
        self._views: set[TerminalView] = set()
        self._reading = False
        self._at_end = False
        self._finishing = False
        self._last = False
        self._owed = REPLAY_SIZE

    def begin(self) -> None:
        """Start to read."""
        self.follow()

    def finish(self, *, last: bool) -> None:
        """The program has ended, and so does the output when all of it was read.

        `last` where that is what can be read by now: somebody else may go on writing.
        """
        self._finishing, self._last = True, last
        self._read()

    def stop(self, fault: Exception | None = None) -> None:
        """Read no more. Safe to repeat."""
        if self.over.is_set():
            return
        self.fault = fault
        self._pause()
        if self._rest is not None:
            self._rest.cancel()
        self.over.set()
        self._wake()

    def join(self, view: TerminalView) -> None:
        """Have somebody look from here on."""
        self._views.add(view)

    def leave(self, view: TerminalView) -> None:
        """Have somebody look no more."""
        self._views.discard(view)
        self.follow()

    def follow(self) -> None:
        """Go on reading, if nobody is too far behind."""
        waits = self._rest is not None or self._at_end or self._is_ahead()
        if self._reading or waits or self.over.is_set():
            return
        if self._last:
            self._read()
        else:
            self._reading = True
            asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        """Read for one turn of the event loop, which is others' too."""
        begin, most = self.replay.end, self._most()
        while (count := self.replay.end - begin) < most:
            if self._is_ahead():
                self._pause()
                break
            if self.over.is_set() or not self._take(most - count):
                break
        else:
            if self._last:
                asyncio.get_running_loop().call_soon(self._read)
        self._wake()
        if not self._last and not self.over.is_set():
            self._slow_down(count)

    def _take(self, most: int) -> bool:
        """Read once; False when there is nothing to read at this moment, or ever."""
        try:
            data = os.read(self._fd, most)
        except BlockingIOError:
            if self._last:
                self.stop()
            return False
        except OSError:
            # EIO: nobody has the other end any more.
            data = b""
        self.replay.add(data)
        if self._last:
            self._owed -= len(data)
        if not data:
            self._at_end = True
            self._pause()
        if self._owed <= 0 or (self._at_end and self._finishing):
            self.stop()
        return bool(data)

    def _most(self) -> int:
        # A tenth of a second's worth, so that what is slow is not slow by leaps.
        return _READ if self._rate is None or self._last else min(_READ, self._rate // 10 or 1)

    def _slow_down(self, count: int) -> None:
        rate = self._rate if self._views else min(self._rate or UNWATCHED_RATE, UNWATCHED_RATE)
        if rate is None or self._rest is not None:
            return
        loop = asyncio.get_running_loop()
        self._due = max(self._due, loop.time() - _BURST_SECONDS) + count / rate
        if (rest := self._due - loop.time()) > 0:
            self._pause()
            self._rest = loop.call_later(rest, self._go_on)

    def _go_on(self) -> None:
        self._rest = None
        self.follow()

    def _is_ahead(self) -> bool:
        if not self._views:
            return False
        return self.replay.end - max(view.position for view in self._views) > _FARTHEST_BEHIND

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._fd)

    def _wake(self) -> None:
        for view in self._views:
            view.look.set()


class TerminalView:
    """The output of a terminal as bytes, from `async for` inside of `async with`.

    First comes what the terminal has kept of its output, unless `replay` is False, then what
    is written, until the program has ended and all was given; when the sandbox ended first,
    `SandboxGone` is raised. An open view keeps the sandbox awake.

    Of several viewers the program waits for the quickest. One that is more than the replay
    behind goes on with the oldest bytes that are kept: `lost` counts those it has missed.
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
        self.look = Event()
        self._output = output
        self._held = hold()
        self._replay = replay

    async def __aenter__(self) -> Self:
        # Before the sandbox is held: what is written meanwhile is for this viewer too.
        replay = self._output.replay
        self.position = replay.start if self._replay else replay.end
        self._output.join(self)
        try:
            await self._held.__aenter__()
        except BaseException:
            self._output.leave(self)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._output.leave(self)
        return await self._held.__aexit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        replay = self._output.replay
        while self.position == replay.end:
            if self._output.over.is_set():
                if self._output.fault is not None:
                    raise self._output.fault
                raise StopAsyncIteration
            self.look.clear()
            await self.look.wait()
        if self.position < replay.start:
            self.lost += replay.start - self.position
            self.position = replay.start
        data = replay.read(self.position, _MOST)
        self.position += len(data)
        self._output.follow()
        return data
