"""The output pipes of one command: read as they fill, and closed soon after its exit."""

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

from smokebox.foundation.loop_shares import pause
from smokebox.runtime.stream import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from smokebox.types import Stream

# After the command's exit: how long another process that holds a pipe may stay silent, and how
# long it may keep writing, before the result is returned without the rest of its output.
DRAIN_SILENCE = 0.1
DRAIN_SECONDS = 0.25

_READ = 1 << 18
_READS_PER_TURN = 4
_PIPE_SIZE = 1 << 16
_BUSY_PIPE_SIZE = 1 << 20


class Pipes:
    """Reads pipes until `start_drain` is called, and then what is left in them.

    The pipes are read in the order in which they became ready, which is the order of writing as
    far as two pipes can tell. `handlers` are called when other descriptors become ready; one of
    them calls `start_drain` when the command has exited, and any may raise.
    """

    def __init__(
        self, pipes: dict[int, Stream], handlers: Mapping[int, Callable[[], None]]
    ) -> None:
        self.finished = False
        self._pipes = pipes
        self._handlers = dict(handlers)
        self._epoll = select.epoll()
        self._ready: deque[int] = deque()
        self._reads = 0
        self._undrained = 0
        self._drain_until: float | None = None
        for fd in (*handlers, *pipes):
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def open_fds(self) -> list[int]:
        """Pipes that another process still has open for writing."""
        return list(self._pipes)

    def remove_handler(self, fd: int) -> None:
        """Stop polling a descriptor of `handlers`."""
        if self._handlers.pop(fd, None):
            self._epoll.unregister(fd)

    def start_drain(self) -> None:
        """Read what the command wrote before it exited, and wait little for other writers."""
        self._undrained = sum(map(_unread, self._pipes))
        self._drain_until = time.monotonic() + DRAIN_SECONDS

    async def read(self, until: float | None = None) -> Chunk | None:
        """Return the next bytes of a pipe, or None at the end.

        Raises `TimeoutError` if nothing happens until the monotonic clock reaches `until`.
        """
        while not self._is_finished():
            if not self._ready:
                self._ready.extend(fd for fd, _ in self._epoll.poll(0))
            if not self._ready:
                await self._wait(until)
                continue
            fd = self._ready.popleft()
            if fd not in self._pipes:
                if handler := self._handlers.get(fd):
                    handler()
            elif data := self._read_pipe(fd):
                # A command that never stops writing would block the loop.
                self._reads += 1
                if self._reads % _READS_PER_TURN == 0:
                    await asyncio.sleep(0)
                    await pause()
                return Chunk(self._pipes[fd], data)
        return None

    def close(self) -> None:
        """Close the pipes, but not the descriptors of `handlers`. Safe to repeat."""
        self._epoll.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _is_finished(self) -> bool:
        if self._drain_until is not None and not self.finished:
            late = self._undrained <= 0 and time.monotonic() > self._drain_until
            self.finished = late or not self._pipes
        return self.finished

    def _read_pipe(self, fd: int) -> bytes:
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return b""
        self._undrained -= len(data)
        if not data:
            del self._pipes[fd]
            os.close(fd)
        elif len(data) == _PIPE_SIZE:
            # It was full: a larger pipe saves many turns. The user's limit may not allow it.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BUSY_PIPE_SIZE)
        return data

    async def _wait(self, until: float | None) -> None:
        if self._drain_until is not None:
            self.finished = not await readable(self._epoll.fileno(), DRAIN_SILENCE)
        elif not await readable(self._epoll.fileno(), until and max(0.0, until - time.monotonic())):
            raise TimeoutError


async def readable(fd: int, timeout: float | None = None) -> bool:
    """Wait until a descriptor is readable; False after `timeout` seconds."""
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


async def writable(fd: int, timeout: float) -> bool:
    """Wait until a descriptor is writable; False after `timeout` seconds."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bool] = loop.create_future()
    loop.add_writer(fd, _settle, future, True)
    timer = loop.call_later(timeout, _settle, future, False)
    try:
        return await future
    finally:
        loop.remove_writer(fd)
        timer.cancel()


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _unread(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
