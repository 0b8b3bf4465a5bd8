"""Starting a lasting process: the files that it is given, and the request for it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
from typing import TYPE_CHECKING

from smokebox.engine.jail import agent, errands
from smokebox.engine.processes import endings
from smokebox.engine.processes.logs import SUFFIXES
from smokebox.engine.run import CannotStart
from smokebox.errors import AccessDenied, PathNotFound, SandboxGone, SmokeboxError
from smokebox.sandbox import keeper
from smokebox.sandbox.filesystems.filesystem import from_os_error

if TYPE_CHECKING:
    from smokebox.engine.processes.endings import Told
    from smokebox.engine.run import Program, Run

EXIT, STDIN = ".exit", ".in"

_MINE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOUND_OUT_SECONDS = 0.01


async def launch(
    run: Run, program: Program, stem: str, *, stdin: bool, timeout: float | None
) -> Told:
    """Make the files that begin with `stem`, and start the program with them.

    Raises the error that says why it did not start; what it raises besides leaves open
    whether it did, which `abandon` settles.
    """
    rate = b"%d" % (run.limits.output_rate or 0)
    request = program.pack(agent.START + b"\0" + rate, timeout=timeout)
    with contextlib.ExitStack() as stack:
        try:
            fds = _make_files(stem, stack, _owner(run, program), stdin=stdin)
        except OSError as error:
            raise from_os_error(error, stem) from error
        control = stack.enter_context(await run.jail.connect())
        answer = await _ask(control, request, fds)
    told = endings.parse(answer)
    if told.leader is not None:
        return told
    if len(answer) == keeper.MESSAGE.size and answer[:1] == keeper.FAILED:
        _, stage, number = keeper.MESSAGE.unpack(answer)
        raise _error(program, stage, number)
    raise run.gone("its minder was killed")


async def signal_minder(run: Run, minder: int, number: int) -> None:
    """Send a signal to a minder itself, if it is there."""
    words = (agent.SIGNAL, b"%d" % minder, b"%d" % number, agent.MINDER)
    with await run.jail.connect() as control:
        await _ask(control, b"\0".join(words), [])


async def abandon(run: Run, stem: str) -> None:
    """Kill what may have been started and that nobody wants, and remove its files."""
    with contextlib.suppress(SandboxGone, TimeoutError):
        async with asyncio.timeout(errands.ANSWER_SECONDS):
            while endings.is_held(stem + EXIT):
                if minder := endings.read(stem + EXIT).minder:
                    await errands.send_signal(run.jail, minder, signal.SIGKILL, tree=True)
                    await signal_minder(run, minder, signal.SIGKILL)
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
    body = keeper.LENGTH.pack(len(request)) + request
    try:
        async with asyncio.timeout(errands.ANSWER_SECONDS):
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
