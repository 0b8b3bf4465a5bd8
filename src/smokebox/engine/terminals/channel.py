"""The engine's end of a terminal: opening it, starting its program, writing, resizing."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import struct
import termios
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from smokebox.engine.jail import guest_init, guest_requests, linux
from smokebox.engine.jail.terminal_supervisor import RESIZE, SIZE, STARTED
from smokebox.engine.run import send_request
from smokebox.errors import LimitReached, SandboxGone, Unsupported
from smokebox.runtime import supervisor
from smokebox.runtime.pipes import writable

if TYPE_CHECKING:
    import socket

    from smokebox.engine.run import Program, Run
    from smokebox.errors import SmokeboxError

_PTMX = "dev/pts/ptmx"
_PTMX_DEVICE = os.makedev(5, 2)
_DEVPTS = 0x1CD1
_NO_LINKS = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_IUTF8 = 0o40000
# The kernel does not always report that a terminal is writable again.
_WRITE_POLL_SECONDS = 0.1
_EXHAUSTED = (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


class Pty(NamedTuple):
    """Descriptors of a pseudoterminal: the engine's, which is non-blocking, and the program's."""

    master: int
    slave: int


def open_pty(root: int, uid: int | None) -> Pty:
    """Open a terminal in /dev/pts of the jail with that root directory.

    Follows no link, and opens only the kernel's devpts, as the sandbox may have replaced it. Raises
    OSError.

    Args:
        root: Descriptor of the root directory of the jail.
        uid: Owner of the terminal on the host; None for the engine's user.
    """
    master = _open_master(root)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, b"\0\0\0\0")
        # Not opened by name, which the sandbox could replace.
        slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _prepare(slave, uid)
        except BaseException:
            os.close(slave)
            raise
    except BaseException:
        os.close(master)
        raise
    return Pty(master, slave)


def _open_master(root: int) -> int:
    path = linux.openat2(root, _PTMX, os.O_PATH, resolve=_NO_LINKS)
    try:
        found = os.fstat(path)
        is_ptmx = stat.S_ISCHR(found.st_mode) and found.st_rdev == _PTMX_DEVICE
        if not is_ptmx or linux.filesystem_of(path) != _DEVPTS:
            raise FileNotFoundError(errno.ENOENT, "the sandbox has no terminals", f"/{_PTMX}")
        flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{path}", flags)
    finally:
        os.close(path)


def _prepare(slave: int, uid: int | None) -> None:
    if uid is not None:
        os.fchown(slave, uid, -1)
    mode = termios.tcgetattr(slave)
    # Without it, backspace erases one byte instead of one character.
    mode[0] |= _IUTF8
    termios.tcsetattr(slave, termios.TCSANOW, mode)


class TerminalChannel(abc.ABC):
    """The descriptors of a terminal: those of the engine, and those passed into the sandbox."""

    # True if the output ends with the terminal, even if other processes have it open.
    has_end: ClassVar[bool]

    def __init__(self, *, input: int, output: int, guest_fds: tuple[int, ...]) -> None:
        self.output = output
        self._input = input
        self._guest_fds = guest_fds
        self._fds = {input, output}

    @abc.abstractmethod
    def request(self, program: Program, cols: int, rows: int) -> bytes:
        """Return the request to the guest init, which gets the guest's descriptors with it."""

    @abc.abstractmethod
    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        """Change the size of the terminal, and notify its programs."""

    def started(self) -> None:
        """Handle the start of the program."""

    async def start(self, run: Run, program: Program, cols: int, rows: int) -> socket.socket:
        """Start the program in the terminal, and return the control socket of its supervisor.

        Closing the socket ends all processes of the terminal.
        """
        request = self.request(program, cols, rows)
        control = await run.jail.connect()
        try:
            kind, stage, number = await self._send(run, control, request)
        except BaseException:
            control.close()
            raise
        if kind == STARTED:
            self.started()
            return control
        control.close()
        if stage == supervisor.STAGE_START:
            raise _no_terminal(run, OSError(number, os.strerror(number)))
        raise program.start_error(stage, number)

    async def write(self, data: bytes, exited: asyncio.Event) -> bool:
        """Write input; return False if the program ended first."""
        left = memoryview(data)
        while left and not exited.is_set():
            try:
                left = left[os.write(self._input, left) :]
            except BlockingIOError:
                await writable(self._input, _WRITE_POLL_SECONDS)
            except OSError:
                return False
        return not left

    def release_guest(self) -> None:
        """Close the descriptors that were passed into the sandbox. Safe to repeat."""
        fds, self._guest_fds = set(self._guest_fds), ()
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        """Close all descriptors. Safe to repeat."""
        self.release_guest()
        while self._fds:
            os.close(self._fds.pop())

    async def _send(
        self, run: Run, control: socket.socket, request: bytes
    ) -> tuple[bytes, int, int]:
        loop = asyncio.get_running_loop()
        message = b""
        try:
            async with asyncio.timeout(guest_requests.RESPONSE_SECONDS):
                await send_request(control, request, self._guest_fds)
                while left := supervisor.MESSAGE.size - len(message):
                    data = await loop.sock_recv(control, left)
                    if not data:
                        raise ConnectionResetError
                    message += data
        except (TimeoutError, OSError) as error:
            raise SandboxGone(
                f"the guest init of sandbox {run.id} does not respond.",
                hint="Create the terminal again.",
                reason="guest init unresponsive",
            ) from error
        kind, stage, number = supervisor.MESSAGE.unpack(message)
        return kind, stage, number


class PtyChannel(TerminalChannel):
    """A terminal of the host's kernel.

    The engine keeps the program's end open until the program has ended: a program may close its
    terminal and open it again, which must not end the output.
    """

    has_end = False

    def __init__(self, pty: Pty) -> None:
        super().__init__(input=pty.master, output=pty.master, guest_fds=(pty.slave,) * 3)

    def request(self, program: Program, cols: int, rows: int) -> bytes:
        self._resize(cols, rows)
        return program.pack(guest_init.TERMINAL)

    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        self._resize(cols, rows)

    def _resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.output, termios.TIOCSWINSZ, struct.pack("@4H", rows, cols, 0, 0))


class PipeChannel(TerminalChannel):
    """Pipes to and from a supervisor, which creates the terminal inside the sandbox."""

    has_end = True

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
        super().__init__(input=input, output=output, guest_fds=(source, sink))

    def request(self, program: Program, cols: int, rows: int) -> bytes:
        return program.pack(guest_init.PTY + b"\0%d:%d" % (cols, rows))

    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        with contextlib.suppress(OSError):
            control.send(RESIZE + SIZE.pack(cols, rows))

    def started(self) -> None:
        # Only the supervisor has these ends now, so its exit ends the output.
        self.release_guest()


def open_channel(run: Run, program: Program) -> TerminalChannel:
    """Open a terminal of the sandbox for the user of a program."""
    ids = run.host_ids(program.user)
    try:
        if run.jail.state.tier != "namespaces":
            # The terminals of another kernel cannot leave it.
            return PipeChannel()
        return PtyChannel(open_pty(run.jail.root, None if ids is None else ids[0]))
    except OSError as error:
        raise _no_terminal(run, error) from error


def _no_terminal(run: Run, error: OSError) -> SmokeboxError:
    if error.errno in _EXHAUSTED:
        return LimitReached(
            f"sandbox {run.id} cannot have another terminal ({error.strerror}).",
            hint="Close terminals, including those opened inside, or raise kernel.pty.max on the "
            "host.",
            limit="terminals",
        )
    return Unsupported(
        f"sandbox {run.id} has no terminals ({error.strerror}).",
        hint="Check that nothing is mounted over /dev/pts in it, or run the command without one.",
        operation="terminal",
        sandbox=run.id,
    )
