"""Starting a program in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING

from smokebox.engine.jail import errands, ptys
from smokebox.engine.jail.minded_terminal import STARTED
from smokebox.engine.run import CannotStart
from smokebox.engine.terminals.line import PipedLine, PtyLine
from smokebox.errors import AccessDenied, LimitReached, PathNotFound, SandboxGone, Unsupported
from smokebox.sandbox import keeper

if TYPE_CHECKING:
    from smokebox.engine.run import Program, Run
    from smokebox.engine.terminals.line import Line
    from smokebox.errors import SmokeboxError

_NO_MORE = (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


async def start(run: Run, program: Program, line: Line, *, cols: int, rows: int) -> socket.socket:
    """Have the program run at the end of the line; what its minder is talked to with.

    When that is closed, everything of it ends. Raises the error that says why it does not run.
    """
    request = line.request(program, cols, rows)
    control = await run.jail.connect()
    try:
        answer = await _ask(control, request, line.theirs)
    except BaseException:
        control.close()
        raise
    kind, stage, number = keeper.MESSAGE.unpack(answer)
    if kind == STARTED:
        line.started()
        return control
    control.close()
    if stage == keeper.STAGE_START:
        raise _no_terminal(run, OSError(number, os.strerror(number)))
    raise _error(program, stage, number)


def open_line(run: Run, program: Program) -> Line:
    """What leads to a terminal of the sandbox, which is the program's user's."""
    owner = run.owner(program)
    try:
        if not ptys.can_open(run.jail):
            return PipedLine()
        return PtyLine(ptys.open_pty(run.jail.root, owner[0] if owner is not None else None))
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
    body = keeper.LENGTH.pack(len(request)) + request
    answer = b""
    try:
        async with asyncio.timeout(errands.ANSWER_SECONDS):
            sent = socket.send_fds(control, [body], fds)
            # A minder that ends before it has read everything says why.
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(control, body[sent:])
            while len(answer) < keeper.MESSAGE.size:
                more = await loop.sock_recv(control, keeper.MESSAGE.size - len(answer))
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
