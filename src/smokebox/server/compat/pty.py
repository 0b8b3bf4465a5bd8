"""Terminals over WebSocket: bytes both ways, and a few frames of text that are about them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect, WebSocketState

from smokebox.errors import Conflict, NotFound, ProcessEnded, SmokeboxError
from smokebox.server.call import Call
from smokebox.server.compat.ids import open_session, sandbox_of, session_asked, session_name
from smokebox.server.compat.refusal import Refusal, failed, refusal_of
from smokebox.server.compat.workspace import WORKSPACE

if TYPE_CHECKING:
    from starlette.websockets import WebSocket

    from smokebox.engine import Sandbox
    from smokebox.engine.terminals.terminal import Terminal
    from smokebox.engine.terminals.view import View

# A shell that shows no prompt by then shows none.
_PROMPT_SECONDS = 2.0
# What may wait for a program that does not read.
_MOST_TYPED = 16 << 20
_OURS = "bridge:"


class _Resize(msgspec.Struct, tag="resize"):
    cols: int
    rows: int


async def refuse_plain(call: Call) -> Response:
    """A terminal that is asked for without a WebSocket."""
    raise Refusal(400, "WebSocket upgrade required")


async def serve(websocket: WebSocket) -> None:
    """A terminal for one socket, which ends with it; with a session, one that stays."""
    try:
        terminal, sandbox, stays = await _open(websocket)
    except (Refusal, SmokeboxError) as error:
        refusal = error if isinstance(error, Refusal) else refusal_of(error)
        await websocket.send_denial_response(refusal.response)
        return
    try:
        await websocket.accept()
        await _show(websocket, terminal)
    except (WebSocketDisconnect, OSError):
        pass
    finally:
        if not stays:
            with contextlib.suppress(NotFound):
                await sandbox.terminals.close(terminal.id)


async def close_terminal(sandbox: Sandbox, session: str) -> None:
    """End the terminal of a session, if there is one."""
    with contextlib.suppress(NotFound):
        await sandbox.terminals.close(_terminal_id(session))


async def _open(websocket: WebSocket) -> tuple[Terminal, Sandbox, bool]:
    query = websocket.query_params
    cols, rows = _number(query.get("cols"), 80), _number(query.get("rows"), 24)
    id = session_asked(websocket, query.get("session"))
    sandbox = sandbox_of(websocket)
    shell = query.get("shell") or None
    try:
        if id is None:
            terminal = await sandbox.terminals.create(
                command=shell, cols=cols, rows=rows, cwd=WORKSPACE
            )
        else:
            terminal = await _of_session(sandbox, id, shell, cols, rows)
    except OSError as error:
        assert isinstance(error, SmokeboxError)
        raise failed("terminal", error, "exec_transport_error") from error
    return terminal, sandbox, id is not None


async def _of_session(
    sandbox: Sandbox, session: str, shell: str | None, cols: int, rows: int
) -> Terminal:
    """The terminal of a session, with what it shows by now; another if its program has ended."""
    name, id = await open_session(sandbox, session), _terminal_id(session)
    with contextlib.suppress(NotFound):
        terminal = await sandbox.terminals.get(id)
        if terminal.running:
            return terminal
        await sandbox.terminals.close(id)
    try:
        return await sandbox.terminals.create(id, command=shell, cols=cols, rows=rows, session=name)
    except Conflict:
        # Another socket has made it since.
        return await sandbox.terminals.get(id)


def _terminal_id(session: str) -> str:
    return f"{_OURS}{session_name(session)}"[:128]


async def _show(websocket: WebSocket, terminal: Terminal) -> None:
    async with terminal.view() as view:
        first = asyncio.ensure_future(_next(view))
        tasks: list[asyncio.Future[Any]] = [first]
        try:
            # A client types at once: into a line that no shell edits yet, it would show twice.
            await asyncio.wait((first,), timeout=_PROMPT_SECONDS)
            await _tell(websocket, {"type": "ready"})
            tasks.append(asyncio.ensure_future(_write(websocket, terminal, view, first)))
            tasks.append(asyncio.ensure_future(_listen(websocket, terminal)))
            done, _ = await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel(*tasks)


async def _write(
    websocket: WebSocket, terminal: Terminal, view: View, first: asyncio.Future[bytes | None]
) -> None:
    """Show what the program writes, to its end."""
    try:
        data = await first
        while data is not None:
            await websocket.send_bytes(data)
            data = await _next(view)
    except SmokeboxError as error:
        await _tell(websocket, {"type": "error", "message": str(error)})
        await websocket.close(1011)
        return
    await _tell(websocket, {"type": "exit", "code": await terminal.wait()})
    await websocket.close()


async def _next(view: View) -> bytes | None:
    return await anext(view, None)


async def _listen(websocket: WebSocket, terminal: Terminal) -> None:
    """Type what the client sends, until it leaves.

    Frames are taken while the program does not read, or one who leaves would not be noticed.
    """
    typed: asyncio.Queue[bytes | _Resize] = asyncio.Queue()
    waiting = 0

    async def pass_on() -> None:
        nonlocal waiting
        while True:
            item = await typed.get()
            with contextlib.suppress(ProcessEnded):
                if isinstance(item, _Resize):
                    await _resize(terminal, item)
                else:
                    await terminal.write(item)
                    waiting -= len(item)

    passing = asyncio.ensure_future(pass_on())
    try:
        while True:
            item = await _frame(websocket)
            if isinstance(item, bytes):
                waiting += len(item)
            if waiting > _MOST_TYPED:
                await _tell(websocket, {"type": "error", "message": "the program reads nothing"})
                await websocket.close(1009)
                return
            if item is not None:
                typed.put_nowait(item)
            if passing.done():
                passing.result()
    finally:
        await _cancel(passing)


async def _frame(websocket: WebSocket) -> bytes | _Resize | None:
    """The next thing that a client wants; None for text that means nothing here."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    if (data := message.get("bytes")) is not None:
        return bytes(data)
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(message["text"], type=_Resize)
    return None


async def _resize(terminal: Terminal, size: _Resize) -> None:
    # A size that no terminal has changes nothing: an error would end the client's terminal.
    with contextlib.suppress(ValueError):
        await terminal.resize(cols=size.cols, rows=size.rows)


async def _tell(websocket: WebSocket, frame: dict[str, object]) -> None:
    if websocket.application_state is WebSocketState.CONNECTED:
        await websocket.send_text(msgspec.json.encode(frame).decode())


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _number(text: str | None, default: int) -> int:
    if not text:
        return default
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise Refusal(400, "cols and rows must be valid numbers") from None
