"""Terminals over WebSocket: binary frames of input and output, text frames of control."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.websockets import WebSocketDisconnect, WebSocketState

from smokebox.errors import Conflict, NotFound, ProcessEnded, SmokeboxError
from smokebox.server.compat.bridge.errors import BridgeError, bridge_error, operation_failed
from smokebox.server.compat.bridge.names import (
    WORKSPACE,
    open_session,
    requested_session,
    sandbox_of,
    session_name,
)
from smokebox.server.compat.bridge.route import bridge_route, decode_query
from smokebox.server.endpoint import ApiCall
from smokebox.tenancy.scopes import WRITE

if TYPE_CHECKING:
    from starlette.websockets import WebSocket

    from smokebox.engine import Sandbox
    from smokebox.engine.terminals.output import OutputView
    from smokebox.engine.terminals.terminal import Terminal

# Do not wait longer for a prompt.
_PROMPT_SECONDS = 2.0
# Limit of input that waits for a program that does not read.
_MOST_PENDING_INPUT = 16 << 20
_ID_PREFIX = "bridge:"


class _Resize(msgspec.Struct, tag="resize"):
    cols: int
    rows: int


class _OpenedTerminal(NamedTuple):
    """A terminal. One of a session is `shared`: it stays open when the client disconnects."""

    terminal: Terminal
    sandbox: Sandbox
    shared: bool


class PtyQuery(msgspec.Struct):
    """Options of a terminal."""

    cols: float = 80
    rows: float = 24
    shell: str | None = None
    session: str | None = None


@bridge_route("GET", "/v1/sandbox/{id}/pty", "ptyTerminal", status=101, errors=(400, 502))
async def refuse_http(call: ApiCall, query: PtyQuery) -> None:
    """Open a terminal over WebSocket.

    Binary frames are input and output. Text frames are JSON: the client sends
    `{"type": "resize", "cols": ..., "rows": ...}`, the server `ready`, `exit` with `code`, and
    `error` with `message`. With `session` the terminal stays open when the client disconnects.
    """
    raise BridgeError(400, "WebSocket upgrade required")


async def serve(websocket: WebSocket) -> None:
    """Serve a terminal. It closes with its socket, unless it belongs to a session."""
    try:
        opened = await _open(websocket)
    except (BridgeError, SmokeboxError) as error:
        refusal = error if isinstance(error, BridgeError) else bridge_error(error)
        await websocket.send_denial_response(refusal.response)
        return
    try:
        await websocket.accept()
        await _attach(websocket, opened.terminal)
    except (WebSocketDisconnect, OSError):
        pass
    finally:
        if not opened.shared:
            with contextlib.suppress(NotFound):
                await opened.sandbox.terminals.close(opened.terminal.id)


async def close_terminal(sandbox: Sandbox, session: str) -> None:
    """Close the terminal of a session, if there is one."""
    with contextlib.suppress(NotFound):
        await sandbox.terminals.close(_terminal_id(session))


async def _open(websocket: WebSocket) -> _OpenedTerminal:
    query = decode_query(PtyQuery, websocket.query_params)
    try:
        cols, rows = int(query.cols), int(query.rows)
    except (ValueError, OverflowError):
        raise BridgeError(400, "cols and rows must be valid numbers") from None
    id = requested_session(websocket, query.session)
    websocket.scope["smokebox.principal"].check_scope(f"sandboxes:{WRITE}")
    sandbox, shell = sandbox_of(websocket), query.shell
    try:
        if id is None:
            terminal = await sandbox.terminals.create(
                command=shell, cols=cols, rows=rows, cwd=WORKSPACE
            )
        else:
            terminal = await _session_terminal(sandbox, id, shell, cols, rows)
    except OSError as error:
        assert isinstance(error, SmokeboxError)
        raise operation_failed("terminal", error, "exec_transport_error") from error
    return _OpenedTerminal(terminal, sandbox, shared=id is not None)


async def _session_terminal(
    sandbox: Sandbox, session: str, shell: str | None, cols: int, rows: int
) -> Terminal:
    """Return the open terminal of a session, or create one if its program has exited."""
    name, id = await open_session(sandbox, session), _terminal_id(session)
    with contextlib.suppress(NotFound):
        terminal = await sandbox.terminals.get(id)
        if terminal.running:
            return terminal
        await sandbox.terminals.close(id)
    try:
        return await sandbox.terminals.create(id, command=shell, cols=cols, rows=rows, session=name)
    except Conflict:
        # Another socket has created it since.
        return await sandbox.terminals.get(id)


def _terminal_id(session: str) -> str:
    return f"{_ID_PREFIX}{session_name(session)}"[:128]


async def _attach(websocket: WebSocket, terminal: Terminal) -> None:
    async with terminal.view() as view:
        first = asyncio.ensure_future(_next(view))
        tasks: list[asyncio.Future[Any]] = [first]
        try:
            # Before the shell edits its line, input that a client types at once is echoed twice.
            await asyncio.wait((first,), timeout=_PROMPT_SECONDS)
            await _send_message(websocket, {"type": "ready"})
            tasks.append(asyncio.ensure_future(_send_output(websocket, terminal, view, first)))
            tasks.append(asyncio.ensure_future(_receive_input(websocket, terminal)))
            done, _ = await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel(*tasks)


async def _send_output(
    websocket: WebSocket,
    terminal: Terminal,
    view: OutputView,
    first: asyncio.Future[bytes | None],
) -> None:
    """Send the output of the program, then its exit code."""
    try:
        data = await first
        while data is not None:
            await websocket.send_bytes(data)
            data = await _next(view)
    except SmokeboxError as error:
        await _send_message(websocket, {"type": "error", "message": str(error)})
        await websocket.close(1011)
        return
    await _send_message(websocket, {"type": "exit", "code": await terminal.wait()})
    await websocket.close()


async def _next(view: OutputView) -> bytes | None:
    return await anext(view, None)


async def _receive_input(websocket: WebSocket, terminal: Terminal) -> None:
    """Write the client's input to the terminal until the client disconnects.

    Frames are read even while the program does not read, to notice a disconnect.
    """
    received: asyncio.Queue[bytes | _Resize] = asyncio.Queue()
    pending = 0

    async def write_all() -> None:
        nonlocal pending
        while True:
            item = await received.get()
            with contextlib.suppress(ProcessEnded):
                if isinstance(item, _Resize):
                    await _resize(terminal, item)
                else:
                    await terminal.write(item)
                    pending -= len(item)

    writing = asyncio.ensure_future(write_all())
    try:
        while True:
            item = await _frame(websocket)
            if isinstance(item, bytes):
                pending += len(item)
            if pending > _MOST_PENDING_INPUT:
                await _send_message(
                    websocket, {"type": "error", "message": "the program does not read its input"}
                )
                await websocket.close(1009)
                return
            if item is not None:
                received.put_nowait(item)
            if writing.done():
                writing.result()
    finally:
        await _cancel(writing)


async def _frame(websocket: WebSocket) -> bytes | _Resize | None:
    """Return the next frame; None for text that is not a known message."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    if (data := message.get("bytes")) is not None:
        return bytes(data)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(message["text"], type=_Resize)
    return None


async def _resize(terminal: Terminal, size: _Resize) -> None:
    # Ignore an invalid size: an error would close the client's terminal.
    with contextlib.suppress(ValueError):
        await terminal.resize(cols=size.cols, rows=size.rows)


async def _send_message(websocket: WebSocket, frame: dict[str, object]) -> None:
    if websocket.application_state is WebSocketState.CONNECTED:
        await websocket.send_text(msgspec.json.encode(frame).decode())


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
