"""Supervision of a program in a terminal: nothing of it outlives the terminal.

When the program has ended, or the engine closes the connection, every process left below the
supervisor gets SIGHUP, and SIGKILL after a grace period.

Where the kernel is not the host's (gVisor), neither end of a terminal can leave that kernel. The
supervisor then creates the terminal itself and relays bytes through two pipes of the engine.
gVisor 20221219 has terminals but does not send the signals of keys and of size changes. Only a
process in the terminal's session can look up the foreground group, so a small signal relay
process stays in that session.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import time

from smokebox.runtime.supervisor import EXITED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.runtime.supervisor import Supervisor

# What the supervisor says once the program runs.
STARTED = b"S"
# How long what is hung up may take to end by itself.
HANGUP_SECONDS = 2.0

_LOOK_SECONDS = 0.02
# What the supervisor is told, with a size after it.
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


class SupervisedTerminal:
    """The program that a supervisor has started in a terminal, and what came of it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.told = False

    def supervise(self) -> None:
        """Report the program's start and its end, and end all that is left of it."""
        supervisor = self.supervisor
        for fd in (supervisor.control.fileno(), supervisor.wake):
            supervisor.poll.register(fd, select.POLLIN)
        supervisor.say(STARTED, 0, supervisor.leader)
        while supervisor.status is None and supervisor.next(None) != "end":
            pass
        self.tell()
        self.hang_up()
        self.tell()

    def enter(self) -> None:
        """Called in what will be the program, once the terminal is its own."""

    def hear(self) -> bool:
        """Take what the engine says; False when it means the end, as all does."""
        return False

    def move(self) -> None:
        """Carry what there is to and fro, where that is on us."""

    def tell(self) -> None:
        """Report how the program ended, once, as soon as that is known."""
        if self.supervisor.status is not None and not self.told:
            self.told = True
            self.supervisor.say(EXITED, 0, self.supervisor.status)

    def hang_up(self) -> None:
        """End everything, for a bounded time."""
        supervisor = self.supervisor
        if not supervisor.childless:
            supervisor.signal_all(signal.SIGHUP, signal.SIGCONT)
        until = time.monotonic() + HANGUP_SECONDS
        while not supervisor.childless and (left := until - time.monotonic()) > 0:
            # Not every kernel tells of an orphan's end.
            supervisor.await_child(min(left, _LOOK_SECONDS))
            self.tell()
        supervisor.destroy()


class RelayedTerminal(SupervisedTerminal):
    """A terminal of this kernel, and the pipes that lead to the engine."""

    def __init__(self, supervisor: Supervisor, pipes: list[int], size: bytes, uid: int) -> None:
        super().__init__(supervisor)
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
        """Send who is in the foreground the signals that the supervisor names, until it is gone."""
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

    def supervise(self) -> None:
        """As for any terminal, and carry the rest of its output."""
        os.close(self.orders)
        self.listen()
        super().supervise()
        self.drain()

    def hang_up(self) -> None:
        """End everything, for a bounded time."""
        os.close(self.usher)
        super().hang_up()

    def hear(self) -> bool:
        """Take what the engine says; False when it means the end."""
        try:
            word = self.supervisor.control.recv(1 + SIZE.size)
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
        poll = self.supervisor.poll
        poll.register(self.source, 0 if self.typed else select.POLLIN)
        poll.register(self.sink, select.POLLOUT if self.written else 0)
        takes = select.POLLOUT if self.typed else 0
        poll.register(self.master, takes if self.written else takes | select.POLLIN)
        self.supervisor.leftovers.update((self.source, self.sink, self.master))

    def drain(self) -> None:
        """Carry what is left to the engine, which may take its time."""
        poll = select.poll()
        poll.register(self.supervisor.control, 0)
        poll.register(self.sink, select.POLLOUT)
        # Somebody else in the sandbox may have the terminal open, and write for ever.
        left = _MOST_LEFT
        while left > 0 and (size := self.take()):
            left -= size
            while self.written:
                if self.supervisor.control.fileno() in dict(poll.poll()):
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
