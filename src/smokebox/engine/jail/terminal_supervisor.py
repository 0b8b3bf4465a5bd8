"""Supervision of a program in a terminal: no process of it outlives the terminal.

When the program has exited, or the engine closes the connection, every process left below the
supervisor gets SIGHUP, and SIGKILL after a grace period. The supervisor shares the CPU of the
sandbox, so the period does not count time in which it did not run itself.

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

# Message of the supervisor once the program runs.
STARTED = b"S"
# Time for processes to exit after SIGHUP, and the longest wait if they get little CPU.
HANGUP_SECONDS, LONGEST_HANGUP_SECONDS = 2.0, 10.0
# Message to the supervisor, followed by a size.
RESIZE = b"R"
SIZE = struct.Struct("!HH")

_REAP_SECONDS = 0.02
# A pause that took longer counts as so long: others did not run meanwhile either.
_COUNTED_SECONDS = 2 * _REAP_SECONDS
_READ = 1 << 16
# gVisor buffers megabytes of unread terminal output.
_MOST_BUFFERED = 1 << 24
# Indexes of the local modes and of the control characters in the list of `tcgetattr`.
_LOCAL, _KEYS = 3, 6
_SIGNALS = (
    (termios.VINTR, signal.SIGINT),
    (termios.VQUIT, signal.SIGQUIT),
    (termios.VSUSP, signal.SIGTSTP),
)


class SupervisedTerminal:
    """A program that a supervisor has started in a terminal, and its descendants."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.reported = False

    def supervise(self) -> None:
        """Report the program's start and its exit, and end all that is left of it."""
        supervisor = self.supervisor
        for fd in (supervisor.control.fileno(), supervisor.wakeup):
            supervisor.poll.register(fd, select.POLLIN)
        supervisor.send(STARTED, 0, supervisor.leader)
        while supervisor.status is None and supervisor.next_event(None) != "stop":
            pass
        self.report_exit()
        self.hang_up()
        self.report_exit()

    def before_exec(self) -> None:
        """Prepare the forked process that will run the program in the terminal."""

    def handle_message(self) -> bool:
        """Handle a message of the engine; False, as every one means that everything must end."""
        return False

    def relay(self) -> None:
        """Copy pending bytes between the terminal and the pipes, where there are pipes."""

    def report_exit(self) -> None:
        """Report the program's exit once, as soon as it is known."""
        if self.supervisor.status is not None and not self.reported:
            self.reported = True
            self.supervisor.send(EXITED, 0, self.supervisor.status)

    def hang_up(self) -> None:
        """End all processes, by SIGKILL after `HANGUP_SECONDS` in which they could run."""
        supervisor = self.supervisor
        if not supervisor.childless:
            supervisor.signal_all(signal.SIGHUP, signal.SIGCONT)
        left, now = HANGUP_SECONDS, time.monotonic()
        until = now + LONGEST_HANGUP_SECONDS
        while not supervisor.childless and left > 0 and now < until:
            # Not every kernel reports the exit of an orphan.
            supervisor.wait_for_child(min(left, _REAP_SECONDS))
            self.report_exit()
            before, now = now, time.monotonic()
            left -= min(now - before, _COUNTED_SECONDS)
        supervisor.kill_all()


class RelayedTerminal(SupervisedTerminal):
    """A terminal of this kernel, and the pipes between it and the engine."""

    def __init__(self, supervisor: Supervisor, pipes: list[int], size: bytes, uid: int) -> None:
        super().__init__(supervisor)
        self.source, self.sink = pipes
        cols, rows = size.split(b":")
        self.signals, self.signal_relay = os.pipe()
        # The peer stays open here: a program may close its last descriptor of the terminal and
        # open it again.
        self.master, self.peer = os.openpty()
        self.resize(int(cols), int(rows))
        os.fchown(self.peer, uid, -1)
        for fd in (self.master, self.source, self.sink):
            os.set_blocking(fd, False)
        self.input = b""
        self.output = b""

    def descriptors(self) -> list[int]:
        """Return stdin, stdout and stderr of the program."""
        return [os.dup(self.peer) for _ in range(3)]

    def before_exec(self) -> None:
        """Fork the signal relay into the session of the program, but not as its child."""
        if pid := os.fork():
            os.waitpid(pid, 0)
            return
        try:
            if not os.fork():
                self.run_signal_relay()
        finally:
            os._exit(0)

    def run_signal_relay(self) -> None:
        """Send the foreground group the signals that the supervisor names, until it is gone."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.dup2(self.signals, 1)
        # The engine waits for the end of pipes that are open here too.
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if int(name) > 1:
                    os.close(int(name))
        while number := os.read(1, 1):
            with contextlib.suppress(OSError):
                os.killpg(os.tcgetpgrp(0), number[0])

    def supervise(self) -> None:
        """Supervise the program, then copy the rest of its output."""
        os.close(self.signals)
        self.update_poll()
        super().supervise()
        self.flush()

    def hang_up(self) -> None:
        """End the signal relay and all processes."""
        os.close(self.signal_relay)
        super().hang_up()

    def handle_message(self) -> bool:
        """Handle a resize; False if everything must end."""
        try:
            word = self.supervisor.control.recv(1 + SIZE.size)
        except ConnectionError:
            return False
        if len(word) != 1 + SIZE.size or word[:1] != RESIZE:
            return False
        self.resize(*SIZE.unpack(word[1:]))
        self.signal_foreground(signal.SIGWINCH)
        return True

    def relay(self) -> None:
        """Copy pending bytes in both directions."""
        if not self.input:
            with contextlib.suppress(OSError):
                self.input = self.send_key_signals(os.read(self.source, _READ))
        if self.input:
            with contextlib.suppress(OSError):
                self.input = self.input[os.write(self.master, self.input) :]
        self.read_output()
        self.write_output()
        self.update_poll()

    def read_output(self) -> int:
        """Read output unless some is pending, and return the number of pending bytes."""
        if not self.output:
            with contextlib.suppress(OSError):
                self.output = os.read(self.master, _READ)
        return len(self.output)

    def write_output(self) -> None:
        """Write pending output, and drop it if the engine is gone."""
        if self.output:
            with contextlib.suppress(BlockingIOError):
                try:
                    self.output = self.output[os.write(self.sink, self.output) :]
                except BrokenPipeError:
                    self.output = b""

    def update_poll(self) -> None:
        """Poll the target of pending bytes for writing, and otherwise their source for reading."""
        poll = self.supervisor.poll
        poll.register(self.source, 0 if self.input else select.POLLIN)
        poll.register(self.sink, select.POLLOUT if self.output else 0)
        writable = select.POLLOUT if self.input else 0
        poll.register(self.master, writable if self.output else writable | select.POLLIN)
        self.supervisor.released.update((self.source, self.sink, self.master))

    def flush(self) -> None:
        """Write the rest of the output to the engine, however slowly it reads."""
        poll = select.poll()
        poll.register(self.supervisor.control, 0)
        poll.register(self.sink, select.POLLOUT)
        # Another process in the sandbox may have the terminal open, and write for ever.
        left = _MOST_BUFFERED
        while left > 0 and (size := self.read_output()):
            left -= size
            while self.output:
                if self.supervisor.control.fileno() in dict(poll.poll()):
                    return
                self.write_output()

    def resize(self, cols: int, rows: int) -> None:
        """Set the size of the terminal."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("@4H", rows, cols, 0, 0))

    def send_key_signals(self, data: bytes) -> bytes:
        """Send the signals of keys such as Ctrl-C in the input, and return the rest of it.

        Like a terminal, it drops the input before such a key, and echoes the key.
        """
        mode = termios.tcgetattr(self.master)
        if not mode[_LOCAL] & termios.ISIG:
            return data
        for index, number in _SIGNALS:
            key = mode[_KEYS][index]
            if key != b"\0" and key in data:
                data = data.rpartition(key)[2]
                if mode[_LOCAL] & termios.ECHO:
                    self.output += b"^%c" % (key[0] ^ 0x40)
                self.signal_foreground(number)
        return data

    def signal_foreground(self, number: int) -> None:
        """Make the signal relay signal the foreground group."""
        with contextlib.suppress(OSError):
            os.write(self.signal_relay, bytes([number]))
