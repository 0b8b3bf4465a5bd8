"""Terminals: programs that are typed to and watched, by several at a time."""

from __future__ import annotations

import contextlib
import functools
import secrets
import shlex
from typing import TYPE_CHECKING

from smokebox.errors import (
    Conflict,
    InvalidOption,
    LimitReached,
    NotFound,
    PathError,
    ProcessEnded,
    SandboxGone,
    Unsupported,
)
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.idempotency import Making
from smokebox.server.sockets import Channel, decode_frame, socket
from smokebox.types import TerminalInfo
from smokebox.wire.answers import Terminals
from smokebox.wire.frames import ReadyFrame, ResizeFrame, TerminalExitFrame
from smokebox.wire.requests import CreateTerminal, OpenTerminal, ResizeTerminal

if TYPE_CHECKING:
    from smokebox.engine.terminals.terminal import Terminal

_NAMING = (InvalidOption, NotFound)
_MAKING = (*_NAMING, PathError, Conflict, LimitReached, SandboxGone, Unsupported)


@endpoint("GET", "/sandboxes/{id}/terminals")
async def list_all(call: Call) -> Terminals:
    """List the terminals of a sandbox, in the order in which they were opened."""
    return Terminals([_info(terminal) for terminal in await call.sandbox.terminals.list()])


@endpoint("POST", "/sandboxes/{id}/terminals", errors=_MAKING, status=201, slow=True)
async def create(call: Call, body: CreateTerminal) -> TerminalInfo:
    """Open a terminal, which ends with its program, or with the server.

    With the header Idempotency-Key the request may be repeated, and opens one.
    """

    async def make(id: str) -> TerminalInfo:
        terminal = await call.sandbox.terminals.create(
            id,
            command=body.command,
            cols=body.cols,
            rows=body.rows,
            cwd=body.cwd,
            env=body.env,
            user=body.user,
            session=body.session,
        )
        return _info(terminal)

    async def find(id: str) -> TerminalInfo:
        return _info(await call.sandbox.terminals.get(id))

    id = body.id if body.id is not None else f"t-{secrets.token_hex(6)}"
    making = Making(kind="terminal", id=id, find=find, make=make, lasts=False)
    return await call.state.requests.once(call, body, making)


@endpoint("GET", "/sandboxes/{id}/terminals/{terminal}", errors=_NAMING)
async def get(call: Call) -> TerminalInfo:
    """What is known of a terminal."""
    return _info(await _terminal(call))


@endpoint("DELETE", "/sandboxes/{id}/terminals/{terminal}", errors=_NAMING, slow=True)
async def close(call: Call) -> None:
    """End a terminal with everything in it, and forget it."""
    await call.sandbox.terminals.close(call.part("terminal"))


@endpoint(
    "POST",
    "/sandboxes/{id}/terminals/{terminal}/resize",
    errors=(*_NAMING, ProcessEnded, SandboxGone),
)
async def resize(call: Call, body: ResizeTerminal) -> TerminalInfo:
    """Have a terminal be of another size, for all who look at it."""
    terminal = await _terminal(call)
    await terminal.resize(cols=body.cols, rows=body.rows)
    return _info(terminal)


@socket("/sandboxes/{id}/terminals/{terminal}")
async def view(call: Call, channel: Channel) -> None:
    """Look at a terminal, and type. It stays when the socket closes.

    The server sends output as binary frames: first what was written lately, then the text
    frame `ready`, then what is written, and at the end `exit`, after which it closes with
    1000. The client sends what is typed as binary frames, and `resize` as text.
    """
    terminal = await _terminal(call)
    await channel.accept()
    await _show(channel, terminal)


@socket("/sandboxes/{id}/terminal")
async def open_one(call: Call, channel: Channel, query: OpenTerminal) -> None:
    """Open a terminal for this socket alone, which ends when the socket closes.

    Frames are as for one that has an id.
    """
    terminals = call.sandbox.terminals
    terminal = await terminals.create(
        command=query.command,
        cols=query.cols,
        rows=query.rows,
        cwd=query.cwd,
        session=query.session,
    )
    try:
        await channel.accept()
        await _show(channel, terminal)
    finally:
        with contextlib.suppress(NotFound):
            await terminals.close(terminal.id)


async def _show(channel: Channel, terminal: Terminal) -> None:
    await channel.converse(_talk(channel, terminal), functools.partial(_hear, terminal))


async def _talk(channel: Channel, terminal: Terminal) -> None:
    async with terminal.view(replay=False) as present:
        now = present.position
    ready = False
    async with terminal.view() as view:
        while True:
            if not ready and view.position >= now:
                ready = True
                await channel.send(ReadyFrame())
            try:
                await channel.send(await anext(view))
            except StopAsyncIteration:
                break
    assert terminal.exit_code is not None
    await channel.send(TerminalExitFrame(code=terminal.exit_code))


async def _hear(terminal: Terminal, frame: bytes | str) -> None:
    if isinstance(frame, bytes):
        await terminal.write(frame)
    else:
        size = decode_frame(ResizeFrame, frame)
        await terminal.resize(cols=size.cols, rows=size.rows)


async def _terminal(call: Call) -> Terminal:
    return await call.sandbox.terminals.get(call.part("terminal"))


def _info(terminal: Terminal) -> TerminalInfo:
    return TerminalInfo(
        id=terminal.id,
        command=shlex.join(terminal.command),
        cols=terminal.cols,
        rows=terminal.rows,
        created_at=terminal.created_at,
        exit_code=terminal.exit_code,
    )


ENDPOINTS = [list_all, create, get, close, resize]
SOCKETS = [view, open_one]
