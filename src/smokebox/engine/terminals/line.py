"""The engine's end of a terminal: opening it, starting its program, reading, writing, resizing."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import termios
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from smokebox.engine.jail import guest_init, guest_requests, linux
from smokebox.engine.jail.terminal_supervisor import RESIZE, SIZE, STARTED
from smokebox.engine.run import CannotStart
from smokebox.errors import AccessDenied, LimitReached, PathNotFound, SandboxGone, Unsupported
from smokebox.runtime import supervisor

if TYPE_CHECKING:
    from smokebox.engine.jail.api import Jail
    from smokebox.engine.run import Program, Run
    from smokebox.errors import SmokeboxError

_PTMX = "dev/pts/ptmx"
_PTMX_DEVICE = os.makedev(5, 2)
_DEVPTS = 0x1CD1
_NO_LINKS = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_IUTF8 = 0o40000
# The kernel does not tell each time that a terminal takes more.
_TRY_AGAIN_SECONDS = 0.1
_NO_MORE = (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pty:
    """Both ends of a terminal: ours, which does not block, and the program's."""

    master: int
    peer: int


def can_open(jail: Jail) -> bool:
    """Whether the terminals of a jail are those of the host's kernel."""
    return jail.state.tier == "namespaces"


def open_pty(root: int, uid: int | None) -> Pty:
    """A terminal of the jail's own /dev/pts, given to `uid` of the host unless it is ours.

    `root` is the root of the jail. Whatever is in the place of its terminals, no link is
    followed, and nothing is opened that is not the kernel's. Raises OSError.
    """
    master = _open_master(root)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, b"\0\0\0\0")
        # By name it could be another one by now.
        peer = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _prepare(peer, uid)
        except BaseException:
            os.close(peer)
            raise
    except BaseException:
        os.close(master)
        raise
    return Pty(master=master, peer=peer)


def _open_master(root: int) -> int:
    place = linux.openat2(root, _PTMX, os.O_PATH, resolve=_NO_LINKS)
    try:
        found = os.fstat(place)
        kind = stat.S_ISCHR(found.st_mode) and found.st_rdev == _PTMX_DEVICE
        if not kind or linux.filesystem_of(place) != _DEVPTS:
            raise FileNotFoundError(2, "the sandbox has no terminals", f"/{_PTMX}")
        flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{place}", flags)
    finally:
        os.close(place)


def _prepare(peer: int, uid: int | None) -> None:
    if uid is not None:
        os.fchown(peer, uid, -1)
    mode = termios.tcgetattr(peer)
    # Else a backspace takes half of a character.
    mode[0] |= _IUTF8
    termios.tcsetattr(peer, termios.TCSANOW, mode)


class TerminalLine(abc.ABC):
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


class PtyLine(TerminalLine):
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
        return program.pack(guest_init.TERMINAL)

    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        """Have the kernel tell the programs."""
        self._resize(cols, rows)

    def _resize(self, cols: int, rows: int) -> None:
        fcntl.ioctl(self.output, termios.TIOCSWINSZ, struct.pack("@4H", rows, cols, 0, 0))


class PipedLine(TerminalLine):
    """Pipes to and from a supervisor, which makes the terminal."""

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
        return program.pack(guest_init.PTY + b"\0%d:%d" % (cols, rows))

    def resize(self, cols: int, rows: int, control: socket.socket) -> None:
        """Have the supervisor do it. In the order of asking, and lost only with the supervisor."""
        with contextlib.suppress(OSError):
            control.send(RESIZE + SIZE.pack(cols, rows))

    def started(self) -> None:
        """Leave the supervisor alone with its ends, so that its end is heard."""
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


async def start_program(
    run: Run, program: Program, line: TerminalLine, *, cols: int, rows: int
) -> socket.socket:
    """Have the program run at the end of the line; what its supervisor is talked to with.

    When that is closed, everything of it ends. Raises the error that says why it does not run.
    """
    request = line.request(program, cols, rows)
    control = await run.jail.connect()
    try:
        answer = await _ask(control, request, line.theirs)
    except BaseException:
        control.close()
        raise
    kind, stage, number = supervisor.MESSAGE.unpack(answer)
    if kind == STARTED:
        line.started()
        return control
    control.close()
    if stage == supervisor.STAGE_START:
        raise _no_terminal(run, OSError(number, os.strerror(number)))
    raise _error(program, stage, number)


def open_line(run: Run, program: Program) -> TerminalLine:
    """What leads to a terminal of the sandbox, which is the program's user's."""
    owner = run.owner(program)
    try:
        if not can_open(run.jail):
            return PipedLine()
        return PtyLine(open_pty(run.jail.root, owner[0] if owner is not None else None))
    except OSError as error:
        raise _no_terminal(run, error) from error


def _no_terminal(run: Run, error: OSError) -> SmokeboxError:
    if error.errno in _NO_MORE:
        return LimitReached(
            f"sandbox {run.id} cannot have another terminal ({error.strerror}).",
            hint="Close terminals, here and inside, or raise kernel.pty.max on the host.",
            limit="terminals",
        )
    return Unsupported(
        f"sandbox {run.id} has no terminals to give ({error.strerror}).",
        hint="See that nothing in it has taken the place of /dev/pts, or run it without one.",
        operation="terminal",
        sandbox=run.id,
    )


async def _ask(control: socket.socket, request: bytes, fds: tuple[int, ...]) -> bytes:
    loop = asyncio.get_running_loop()
    body = supervisor.LENGTH.pack(len(request)) + request
    answer = b""
    try:
        async with asyncio.timeout(guest_requests.ANSWER_SECONDS):
            sent = socket.send_fds(control, [body], fds)
            # A supervisor that ends before it has read everything says why.
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(control, body[sent:])
            while len(answer) < supervisor.MESSAGE.size:
                more = await loop.sock_recv(control, supervisor.MESSAGE.size - len(answer))
                if not more:
                    raise ConnectionResetError
                answer += more
    except (TimeoutError, OSError) as error:
        raise SandboxGone(
            "the agent of the sandbox does not answer.",
            hint="Create the terminal again.",
            reason="agent silent",
        ) from error
    return answer


def _error(program: Program, stage: int, number: int) -> SmokeboxError:
    error = program.explain(stage, number)
    if not isinstance(error, CannotStart):
        return error
    name = program.argv[0]
    if error.exit_code == 127:
        return PathNotFound(
            name,
            f"there is no program {name!r:.200} to run in a terminal.",
            hint="Pass its path or add its directory to PATH; pass words as a list.",
        )
    return AccessDenied(name, f"{error}.", hint="Make it executable, and see what its #! names.")
