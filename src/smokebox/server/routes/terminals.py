"""Terminals: interactive programs, which several clients can share."""

from __future__ import annotations

import contextlib
import functools
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
from smokebox.foundation.ids import new_id
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.idempotency import Creation
from smokebox.server.websocket import WebSocketChannel, decode_frame, websocket
from smokebox.types import TerminalInfo
from smokebox.wire.frames import ReadyFrame, ResizeFrame, TerminalExitFrame
from smokebox.wire.requests import CreateTerminal, OpenTerminal, ResizeTerminal
from smokebox.wire.responses import Terminals

if TYPE_CHECKING:
    from smokebox.engine.terminals.terminal import Terminal

_LOOKUP_ERRORS = (InvalidOption, NotFound)
_CREATE_ERRORS = (*_LOOKUP_ERRORS, PathError, Conflict, LimitReached, SandboxGone, Unsupported)


@endpoint("GET", "/sandboxes/{id}/terminals")
async def list_all(call: ApiCall) -> Terminals:
    """List the terminals of a sandbox, in order of creation."""
    return Terminals([_info(terminal) for terminal in await call.sandbox.terminals.list()])


@endpoint("POST", "/sandboxes/{id}/terminals", errors=_CREATE_ERRORS, status=201, slow=True)
async def create(call: ApiCall, body: CreateTerminal) -> TerminalInfo:
    """Open a terminal. It ends with its program, or with the server.

    With the header Idempotency-Key the request may be repeated, and opens one terminal.
    """

    async def create_with_id(id: str) -> TerminalInfo:
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

    id = body.id if body.id is not None else new_id("t")
    return await call.state.idempotency.once(
        call,
        body,
        Creation(kind="terminal", id=id, find=find, create=create_with_id, durable=False),
    )


@endpoint("GET", "/sandboxes/{id}/terminals/{terminal}", errors=_LOOKUP_ERRORS)
async def get(call: ApiCall) -> TerminalInfo:
    """Return the state of a terminal."""
    return _info(await _terminal(call))


@endpoint("DELETE", "/sandboxes/{id}/terminals/{terminal}", errors=_LOOKUP_ERRORS, slow=True)
async def close(call: ApiCall) -> None:
    """Close a terminal and kill the processes in it."""
    await call.sandbox.terminals.close(call.path_param("terminal"))


@endpoint(
    "POST",
    "/sandboxes/{id}/terminals/{terminal}/resize",
    errors=(*_LOOKUP_ERRORS, ProcessEnded, SandboxGone),
)
async def resize(call: ApiCall, body: ResizeTerminal) -> TerminalInfo:
    """Resize a terminal, for all of its clients."""
    terminal = await _terminal(call)
    await terminal.resize(cols=body.cols, rows=body.rows)
    return _info(terminal)


@websocket("/sandboxes/{id}/terminals/{terminal}")
async def view(call: ApiCall, channel: WebSocketChannel) -> None:
    """Attach to a terminal. It stays open when the socket closes.

    The server sends output as binary frames: first recent output, then the text frame `ready`,
    then live output, and at the end the text frame `exit`, after which it closes with 1000. The
    client sends input as binary frames, and `resize` as text.
    """
    terminal = await _terminal(call)
    await channel.accept()
    await _show(channel, terminal)


@websocket("/sandboxes/{id}/terminal")
async def open_one(call: ApiCall, channel: WebSocketChannel, query: OpenTerminal) -> None:
    """Open a terminal for this socket only. It closes with the socket.

    Frames are those of a terminal with an id.
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


async def _show(channel: WebSocketChannel, terminal: Terminal) -> None:
    await channel.run(_send(channel, terminal), functools.partial(_receive, terminal))


async def _send(channel: WebSocketChannel, terminal: Terminal) -> None:
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


async def _receive(terminal: Terminal, frame: bytes | str) -> None:
    if isinstance(frame, bytes):
        await terminal.write(frame)
    else:
        size = decode_frame(ResizeFrame, frame)
        await terminal.resize(cols=size.cols, rows=size.rows)


async def _terminal(call: ApiCall) -> Terminal:
    return await call.sandbox.terminals.get(call.path_param("terminal"))


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
