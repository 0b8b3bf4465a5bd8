"""Starting a background process: its files, its stdin pipe and the request to guest init."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_init, guest_requests
from smokebox.engine.processes.lifetime import is_held, parse_exit_file, read_exit_file
from smokebox.engine.processes.logs import SUFFIXES
from smokebox.engine.run import CannotStart
from smokebox.errors import (
    AccessDenied,
    PathNotFound,
    SandboxGone,
    SmokeboxError,
    Unsupported,
    from_os_error,
)
from smokebox.foundation.text import encode_option
from smokebox.runtime import supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.processes.lifetime import ExitRecord
    from smokebox.engine.run import Program, Run

EXIT, STDIN = ".exit", ".in"

_MINE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOUND_OUT_SECONDS = 0.01


async def launch(
    run: Run, program: Program, stem: str, *, stdin: bool, timeout: float | None
) -> ExitRecord:
    """Make the files that begin with `stem`, and start the program with them.

    Raises the error that says why it did not start; what it raises besides leaves open
    whether it did, which `abandon` settles.
    """
    rate = b"%d" % (run.limits.output_rate or 0)
    request = program.pack(guest_init.START + b"\0" + rate, timeout=timeout)
    with contextlib.ExitStack() as stack:
        try:
            fds = _make_files(stem, stack, _owner(run, program), stdin=stdin)
        except OSError as error:
            raise from_os_error(error, stem) from error
        control = stack.enter_context(await run.jail.connect())
        answer = await _ask(control, request, fds)
    told = parse_exit_file(answer)
    if told.leader is not None:
        return told
    if len(answer) == supervisor.MESSAGE.size and answer[:1] == supervisor.FAILED:
        _, stage, number = supervisor.MESSAGE.unpack(answer)
        raise _error(program, stage, number)
    raise run.gone("its supervisor was killed")


async def signal_supervisor(run: Run, supervisor_pid: int, number: int) -> None:
    """Send a signal to a supervisor itself, if it is there."""
    words = (guest_init.SIGNAL, b"%d" % supervisor_pid, b"%d" % number, guest_init.SUPERVISOR)
    with await run.jail.connect() as control:
        await _ask(control, b"\0".join(words), [])


async def abandon(run: Run, stem: str) -> None:
    """Kill what may have been started and that nobody wants, and remove its files."""
    with contextlib.suppress(SandboxGone, TimeoutError):
        async with asyncio.timeout(guest_requests.ANSWER_SECONDS):
            while is_held(stem + EXIT):
                if supervisor_pid := read_exit_file(stem + EXIT).supervisor_pid:
                    await guest_requests.send_signal(
                        run.jail, supervisor_pid, signal.SIGKILL, tree=True
                    )
                    await signal_supervisor(run, supervisor_pid, signal.SIGKILL)
                await asyncio.sleep(_FOUND_OUT_SECONDS)
    remove_files(stem)


def remove_files(stem: str) -> None:
    """Remove all files of a process."""
    for suffix in (*SUFFIXES.values(), STDIN, EXIT):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stem + suffix)


def _make_files(
    stem: str, stack: contextlib.ExitStack, owner: tuple[int, int], *, stdin: bool
) -> list[int]:
    fds = _stdin(stem + STDIN, stack, owner) if stdin else [_open(os.devnull, os.O_RDONLY, stack)]
    fds[1:1] = [_open(stem + suffix, os.O_WRONLY | _MINE, stack) for suffix in SUFFIXES.values()]
    book = _open(stem + EXIT, os.O_WRONLY | _MINE, stack)
    fcntl.flock(book, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fds.insert(3, book)
    return fds


def _stdin(path: str, stack: contextlib.ExitStack, owner: tuple[int, int]) -> list[int]:
    """Both ends of a pipe with a name, by which another engine finds it again."""
    os.mkfifo(path, 0o600)
    # For a program that opens /dev/stdin.
    os.chown(path, *owner)
    read = _open(path, os.O_RDONLY | os.O_NONBLOCK, stack)
    os.set_blocking(read, True)
    return [read, _open(path, os.O_WRONLY, stack)]


def _open(path: str, flags: int, stack: contextlib.ExitStack) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    return fd


def _owner(run: Run, program: Program) -> tuple[int, int]:
    """Who the program's user is outside."""
    owner = run.jail.owner
    if owner.count == 1:
        return owner.uid, owner.gid
    return owner.uid + program.user.uid, owner.gid + program.user.gid


async def _ask(control: socket.socket, request: bytes, fds: list[int]) -> bytes:
    loop = asyncio.get_running_loop()
    body = supervisor.LENGTH.pack(len(request)) + request
    try:
        async with asyncio.timeout(guest_requests.ANSWER_SECONDS):
            sent = socket.send_fds(control, [body], fds) if fds else 0
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(control, body[sent:])
            return await loop.sock_recv(control, 64)
    except (TimeoutError, OSError) as error:
        raise SandboxGone(
            "the agent of the sandbox does not answer.",
            hint="Start the process again.",
            reason="agent silent",
        ) from error


def _error(program: Program, stage: int, number: int) -> SmokeboxError:
    """Why a program did not start; `exec` makes results of the first two."""
    error = program.explain(stage, number)
    if not isinstance(error, CannotStart):
        return error
    name = program.argv[0]
    if error.exit_code == 127:
        return PathNotFound(
            name,
            f"there is no program {name!r:.200} to start.",
            hint="Pass its path or add its directory to PATH; pass a str to have bash look.",
        )
    return AccessDenied(name, f"{error}.", hint="Make it executable, and see what its #! names.")


class Stdin:
    """Writes without ever blocking the event loop, one write after the other."""

    def __init__(self, path: str, process: str) -> None:
        self._path = path
        self._process = process
        self._fd: int | None = None
        self._turn = asyncio.Lock()

    async def write(self, data: str | bytes, over: asyncio.Event) -> bool:
        """Write all of it; False when the process has ended before it was taken."""
        left = memoryview(encode_option("data", data))
        async with self._turn:
            while left and not over.is_set():
                try:
                    fd = self._open()
                    left = left[os.write(fd, left) :]
                except BlockingIOError:
                    await _writable(fd, over)
                except BrokenPipeError:
                    if not over.is_set():
                        await self._not_read(over)
        if over.is_set():
            self.let_go()
        return not left

    async def close(self) -> None:
        """Let nobody write any more, in this engine or another."""
        async with self._turn:
            self._close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def let_go(self) -> None:
        """Close our end, unless somebody waits to write; the process does not notice."""
        if not self._turn.locked():
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise self._closed("was closed") from None
            except OSError as error:
                # ENXIO: a pipe that nobody has open for reading.
                raise BrokenPipeError(error.errno, "nobody reads") from None
        return self._fd

    async def _not_read(self, over: asyncio.Event) -> None:
        """Nobody has the other end: either the process ends, or it has closed its stdin."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await over.wait()
                return
        raise self._closed("is not read any more: the process has closed it")

    def _closed(self, how: str) -> Unsupported:
        return Unsupported(
            f"the stdin of process {self._process} {how}.",
            hint="Start another process to write to.",
            operation="write_stdin",
        )


async def _writable(fd: int, over: asyncio.Event) -> None:
    """Wait until a pipe takes more, or the process is over."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    waiting = [asyncio.ensure_future(event.wait()) for event in (ready, over)]
    stop: Callable[[int], bool] = loop.remove_writer
    loop.add_writer(fd, ready.set)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop(fd)
        for one in waiting:
            one.cancel()
