"""A terminal that is made by its minder, where the kernel is not the host's.

Neither end of it can leave that kernel. So what is typed and what is written go through two
pipes of the engine's, and the minder carries it.

gVisor 20221219 knows terminals, but not the signals of keys and of another size. Who is to
get them only a process of the terminal's session can ask: so one is left there, the usher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios

from smokebox.engine.jail.minded_terminal import MindedTerminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.sandbox.keeper import Minder

# What the minder is told, with a size after it.
RESIZE = b"R"
SIZE = struct.Struct("!HH")

_READ = 1 << 16
# gVisor keeps megabytes of what a program has written and nobody read.
_MOST_LEFT = 1 << 24
# Where termios has the local modes, and the keys.
_LOCAL, _KEYS = 3, 6
_SIGNALS = (
    (termios.VINTR, signal.SIGINT),
    (termios.VQUIT, signal.SIGQUIT),
    (termios.VSUSP, signal.SIGTSTP),
)


class PumpedTerminal(MindedTerminal):
    """A terminal of this kernel, and the pipes that lead to the engine."""

    def __init__(self, minder: Minder, pipes: list[int], size: bytes, uid: int) -> None:
        super().__init__(minder)
        self.source, self.sink = pipes
        cols, rows = size.split(b":")
        self.orders, self.usher = os.pipe()
        # The other end stays open here: with the last of them, the terminal would be gone
        # for a program that closes it and opens it again.
        self.master, self.peer = os.openpty()
        self.resize(int(cols), int(rows))
        os.fchown(self.peer, uid, -1)
        for fd in (self.master, self.source, self.sink):
            os.set_blocking(fd, False)
        self.typed = b""
        self.written = b""

    def descriptors(self) -> list[int]:
        """What the program gets."""
        return [os.dup(self.peer) for _ in range(3)]

    def enter(self) -> None:
        """Leave an usher in the session of the program, who is nobody's child there."""
        if pid := os.fork():
            os.waitpid(pid, 0)
            return
        try:
            if not os.fork():
                self.ush()
        finally:
            os._exit(0)

    def ush(self) -> None:
        """Send who is in the foreground the signals that the minder names, until it is gone."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.dup2(self.orders, 1)
        # The engine would wait for the end of what is still open here.
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if int(name) > 1:
                    os.close(int(name))
        while number := os.read(1, 1):
            with contextlib.suppress(OSError):
                os.killpg(os.tcgetpgrp(0), number[0])

    def mind(self) -> None:
        """As for any terminal, and carry the rest of its output."""
        os.close(self.orders)
        self.listen()
        super().mind()
        self.drain()

    def hang_up(self) -> None:
        """End everything, for a bounded time."""
        os.close(self.usher)
        super().hang_up()

    def hear(self) -> bool:
        """Take what the engine says; False when it means the end."""
        try:
            word = self.minder.control.recv(1 + SIZE.size)
        except ConnectionError:
            return False
        if len(word) != 1 + SIZE.size or word[:1] != RESIZE:
            return False
        self.resize(*SIZE.unpack(word[1:]))
        self.order(signal.SIGWINCH)
        return True

    def move(self) -> None:
        """Carry what there is, and wait for what there is to wait for."""
        if not self.typed:
            with contextlib.suppress(OSError):
                self.typed = self.without_keys(os.read(self.source, _READ))
        if self.typed:
            with contextlib.suppress(OSError):
                self.typed = self.typed[os.write(self.master, self.typed) :]
        self.take()
        self.give()
        self.listen()

    def take(self) -> int:
        """Read what was written, unless there is some; how much there is."""
        if not self.written:
            with contextlib.suppress(OSError):
                self.written = os.read(self.master, _READ)
        return len(self.written)

    def give(self) -> None:
        """Write of it what the pipe takes. One without an engine behind it takes all."""
        if self.written:
            with contextlib.suppress(BlockingIOError):
                try:
                    self.written = self.written[os.write(self.sink, self.written) :]
                except BrokenPipeError:
                    self.written = b""

    def listen(self) -> None:
        """Wait for the one to be written to that has not taken all, and not for its source."""
        poll = self.minder.poll
        poll.register(self.source, 0 if self.typed else select.POLLIN)
        poll.register(self.sink, select.POLLOUT if self.written else 0)
        takes = select.POLLOUT if self.typed else 0
        poll.register(self.master, takes if self.written else takes | select.POLLIN)
        self.minder.leftovers.update((self.source, self.sink, self.master))

    def drain(self) -> None:
        """Carry what is left to the engine, which may take its time."""
        poll = select.poll()
        poll.register(self.minder.control, 0)
        poll.register(self.sink, select.POLLOUT)
        # Somebody else in the sandbox may have the terminal open, and write for ever.
        left = _MOST_LEFT
        while left > 0 and (size := self.take()):
            left -= size
            while self.written:
                if self.minder.control.fileno() in dict(poll.poll()):
                    return
                self.give()

    def resize(self, cols: int, rows: int) -> None:
        """Have the terminal be of another size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("@4H", rows, cols, 0, 0))

    def without_keys(self, data: bytes) -> bytes:
        """What is typed, once the keys in it that mean a signal have made one.

        As a terminal does: what was typed before is forgotten, and the key is shown.
        """
        mode = termios.tcgetattr(self.master)
        if not mode[_LOCAL] & termios.ISIG:
            return data
        for place, number in _SIGNALS:
            key = mode[_KEYS][place]
            if key != b"\0" and key in data:
                data = data.rpartition(key)[2]
                if mode[_LOCAL] & termios.ECHO:
                    self.written += b"^%c" % (key[0] ^ 0x40)
                self.order(number)
        return data

    def order(self, number: int) -> None:
        """Have a signal sent to who is in the foreground."""
        with contextlib.suppress(OSError):
            os.write(self.usher, bytes([number]))
