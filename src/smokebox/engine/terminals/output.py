"""What a terminal has written: read as far as its viewers follow, and kept for the next ones."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from smokebox.engine.terminals.replay import Replay

if TYPE_CHECKING:
    from smokebox.engine.terminals.view import View

REPLAY_SIZE = 256 << 10
# Bytes a second that are read while nobody looks: the program goes on, and the engine's
# thread is left to others.
UNWATCHED_RATE = 8 << 20
# So far the viewer that is the most advanced may be behind before the program has to wait.
_FARTHEST_BEHIND = REPLAY_SIZE // 2
_READ = 1 << 16
_BURST_SECONDS = 0.1


class Output:
    """Reads a descriptor that does not block into a ring, and wakes those who look.

    With viewers it reads no further than the ring holds for the most advanced one, so that
    one loses nothing; without, all that comes. It reads at most `rate` bytes a second. `over`
    once there will be no more, with the `fault` that ended it, if any.
    """

    def __init__(self, fd: int, rate: int | None = None) -> None:
        self.replay = Replay(REPLAY_SIZE)
        self.over = asyncio.Event()
        self.fault: Exception | None = None
        self._fd = fd
        self._rate = rate
        self._due = 0.0
        self._rest: asyncio.TimerHandle | None = None
        self._views: set[View] = set()
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

    def join(self, view: View) -> None:
        """Have somebody look from here on."""
        self._views.add(view)

    def leave(self, view: View) -> None:
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
