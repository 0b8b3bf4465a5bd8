"""The output pipes of one command: read as they fill, and let go soon after its end."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import select
import termios
import time
from collections import deque
from typing import TYPE_CHECKING

from smokebox.runtime.stream import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from smokebox.types import Stream

# After the command's exit: how long something else that holds a pipe may stay silent, and
# how long it may go on talking, before the result is given without it.
DRAIN_SILENCE = 0.1
DRAIN_SECONDS = 0.25

_READ = 1 << 18
_READS_PER_TURN = 4
_PIPE_SIZE = 1 << 16
_BUSY_PIPE_SIZE = 1 << 20


class Pipes:
    """Reads until the command has ended, of which `hear` tells, and a little beyond.

    The pipes are read in the order in which they became ready, which is the order of
    writing as far as two pipes can tell. `hear` holds what is called when another
    descriptor becomes ready; one of these calls `end`, and may raise.
    """

    def __init__(self, pipes: dict[int, Stream], hear: Mapping[int, Callable[[], None]]) -> None:
        self.over = False
        self._pipes = pipes
        self._hear = dict(hear)
        self._epoll = select.epoll()
        self._ready: deque[int] = deque()
        self._reads = 0
        self._owed = 0
        self._limit: float | None = None
        for fd in (*hear, *pipes):
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def open(self) -> list[int]:
        """The pipes that somebody can still write to."""
        return list(self._pipes)

    def forget(self, fd: int) -> None:
        """Stop listening to a descriptor of `hear`."""
        if self._hear.pop(fd, None):
            self._epoll.unregister(fd)

    def end(self) -> None:
        """The command has ended: give what it wrote, and wait little for anybody else."""
        self._owed = sum(map(_unread, self._pipes))
        self._limit = time.monotonic() + DRAIN_SECONDS

    async def read(self, until: float | None = None) -> Chunk | None:
        """The next bytes of a pipe, or None when the command is over.

        Raises `TimeoutError` when the monotonic clock passes `until` in silence.
        """
        while not self._is_over():
            if not self._ready:
                self._ready.extend(fd for fd, _ in self._epoll.poll(0))
            if not self._ready:
                await self._wait(until)
                continue
            fd = self._ready.popleft()
            if fd not in self._pipes:
                if hear := self._hear.get(fd):
                    hear()
            elif data := self._take(fd):
                await self._give_way()
                return Chunk(self._pipes[fd], data)
        return None

    def close(self) -> None:
        """Close the pipes. Descriptors of `hear` are their owner's. Safe to repeat."""
        self._epoll.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _is_over(self) -> bool:
        if self._limit is not None and not self.over:
            talking_on = self._owed <= 0 and time.monotonic() > self._limit
            self.over = talking_on or not self._pipes
        return self.over

    def _take(self, fd: int) -> bytes:
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return b""
        self._owed -= len(data)
        if not data:
            del self._pipes[fd]
            os.close(fd)
        elif len(data) == _PIPE_SIZE:
            # It was full: a longer pipe saves many turns. There may be no more of them to have.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BUSY_PIPE_SIZE)
        return data

    async def _give_way(self) -> None:
        # A command that never stops writing would otherwise keep the loop to itself.
        self._reads += 1
        if self._reads % _READS_PER_TURN == 0:
            await asyncio.sleep(0)

    async def _wait(self, until: float | None) -> None:
        if self._limit is not None:
            self.over = not await readable(self._epoll.fileno(), DRAIN_SILENCE)
        elif not await readable(self._epoll.fileno(), until and max(0.0, until - time.monotonic())):
            raise TimeoutError


async def readable(fd: int, timeout: float | None = None) -> bool:
    """Wait until a descriptor can be read; False when `timeout` seconds have passed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()
    loop.add_reader(fd, _settle, future, True)
    timer = None if timeout is None else loop.call_later(timeout, _settle, future, False)
    try:
        return await future
    finally:
        loop.remove_reader(fd)
        if timer is not None:
            timer.cancel()


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _unread(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
