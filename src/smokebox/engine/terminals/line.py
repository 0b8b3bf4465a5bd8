"""The engine's end of a terminal: where it is read, typed into, and given its size."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from smokebox.engine.jail.ptys import Pty

# The kernel does not tell each time that a terminal takes more.
_TRY_AGAIN_SECONDS = 0.1


class Line:
    """What leads to a terminal: its own end, and a hold on the program's until that ended.

    With that hold the end of the output is not taken for come when a program closes the
    terminal and opens it again.
    """

    def __init__(self, pty: Pty) -> None:
        self._pty = pty
        self._held = True
        self._closed = False

    @property
    def output(self) -> int:
        """What to read."""
        return self._pty.master

    @property
    def theirs(self) -> tuple[int, ...]:
        """What the program is given."""
        return (self._pty.peer,) * 3

    def resize(self, cols: int, rows: int, control: socket.socket | None = None) -> None:
        """Have the terminal be of another size, and its programs told."""
        size = struct.pack("@4H", rows, cols, 0, 0)
        fcntl.ioctl(self._pty.master, termios.TIOCSWINSZ, size)

    async def write(self, data: bytes, over: asyncio.Event) -> bool:
        """Type; False when the program has ended before all was taken."""
        left = memoryview(data)
        while left and not over.is_set():
            try:
                left = left[os.write(self._pty.master, left) :]
            except BlockingIOError:
                await _writable(self._pty.master, _TRY_AGAIN_SECONDS)
            except OSError:
                return False
        return not left

    def release(self) -> None:
        """Let go of the program's end. Safe to repeat."""
        if self._held:
            self._held = False
            os.close(self._pty.peer)

    def close(self) -> None:
        """Let go of both. Safe to repeat."""
        self.release()
        if not self._closed:
            self._closed = True
            os.close(self._pty.master)


async def _writable(fd: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(fd, ready.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ready.wait()
    finally:
        loop.remove_writer(fd)
