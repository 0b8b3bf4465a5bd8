"""The engine's end of a terminal: where it is read, typed into, and given its size."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from typing import TYPE_CHECKING, ClassVar

from smokebox.engine.jail import agent
from smokebox.engine.jail.pumped_terminal import RESIZE, SIZE

if TYPE_CHECKING:
    import socket

    from smokebox.engine.jail.ptys import Pty
    from smokebox.engine.run import Program

# The kernel does not tell each time that a terminal takes more.
_TRY_AGAIN_SECONDS = 0.1


class Line(abc.ABC):
    """What leads to a terminal: our descriptors, and those that go into the sandbox."""

    # Whether the output ends for all when the terminal has, whoever else has that open.
    tells_its_end: ClassVar[bool]

    def __init__(self, *, input: int, output: int, theirs: tuple[int, ...]) -> None:
        self._input = input
        self.output = output
        self.theirs = theirs
        self._held = set(theirs)
        self._ours = {input, output}

    @abc.abstractmethod
    def request(self, program: Program, cols: int, rows: int) -> bytes:
        """What the agent is asked for, with `theirs`."""

    @abc.abstractmethod
    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        """Have the terminal be of another size, and its programs told."""

    def started(self) -> None:
        """The program runs."""

    async def write(self, data: bytes, over: asyncio.Event) -> bool:
        """Type; False when the program has ended before all was taken."""
        left = memoryview(data)
        while left and not over.is_set():
            try:
                left = left[os.write(self._input, left) :]
            except BlockingIOError:
                await _writable(self._input, _TRY_AGAIN_SECONDS)
            except OSError:
                return False
        return not left

    def release(self) -> None:
        """Let go of what is in the sandbox. Safe to repeat."""
        while self._held:
            os.close(self._held.pop())

    def close(self) -> None:
        """Let go of everything. Safe to repeat."""
        self.release()
        while self._ours:
            os.close(self._ours.pop())


class PtyLine(Line):
    """A terminal of the host's kernel.

    The program's end of it is held here too until that has ended: a program may close its
    terminal and open it again, which is not the end of the output.
    """

    tells_its_end = False

    def __init__(self, pty: Pty) -> None:
        super().__init__(input=pty.master, output=pty.master, theirs=(pty.peer,) * 3)

    def request(self, program: Program, cols: int, rows: int) -> bytes:
        """To start the program in the terminal that there is."""
        self._resize(cols, rows)
        return program.pack(agent.TERMINAL)

    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        """Have the kernel tell the programs."""
        self._resize(cols, rows)

    def _resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.output, termios.TIOCSWINSZ, struct.pack("@4H", rows, cols, 0, 0))


class PipedLine(Line):
    """Pipes to and from a minder, which makes the terminal."""

    tells_its_end = True

    def __init__(self) -> None:
        source, input = os.pipe()
        try:
            output, sink = os.pipe()
        except OSError:
            os.close(source)
            os.close(input)
            raise
        for fd in (input, output):
            os.set_blocking(fd, False)
        super().__init__(input=input, output=output, theirs=(source, sink))

    def request(self, program: Program, cols: int, rows: int) -> bytes:
        """To make a terminal, and start the program in it."""
        return program.pack(agent.PTY + b"\0%d:%d" % (cols, rows))

    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        """Have the minder do it. In the order of asking, and lost only with the minder."""
        with contextlib.suppress(OSError):
            control.send(RESIZE + SIZE.pack(cols, rows))

    def started(self) -> None:
        """Leave the minder alone with its ends, so that its end is heard."""
        self.release()


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
