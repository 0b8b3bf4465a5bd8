"""Commands: their output as events in base64, and last how they ended."""

from __future__ import annotations

import base64
import contextlib
from typing import TYPE_CHECKING

import msgspec

from smokebox.errors import InvalidOption, PathError, PathNotFound, SmokeboxError
from smokebox.server.call import Call
from smokebox.server.compat.characters import WholeCharacters
from smokebox.server.compat.ids import open_session, sandbox_of, session_asked
from smokebox.server.compat.messages import decoded
from smokebox.server.compat.refusal import Refusal, refusal_of
from smokebox.server.compat.workspace import WORKSPACE, contained, workspace_path
from smokebox.server.events import EventResponse
from smokebox.wire import sse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from smokebox.engine import Sandbox
    from smokebox.sandbox.capture import ByteStream


class ExecBody(msgspec.Struct):
    """What is to run: words, none of which a shell reads."""

    argv: list[str] = []
    timeout_ms: float | None = None
    cwd: str | None = None


async def run(call: Call) -> EventResponse:
    """Run a command. Whoever leaves kills it, and so does `timeout_ms`, with exit code 124."""
    body = decoded(ExecBody, await call.body())
    if not body.argv:
        raise Refusal(400, "argv must be a non-empty array")
    if body.timeout_ms is not None and not 0 < body.timeout_ms < float("inf"):
        raise Refusal(400, f"timeout_ms must be a positive number, not {body.timeout_ms}")
    id = session_asked(call.request)
    cwd = None if body.cwd is None else workspace_path(body.cwd)
    sandbox = sandbox_of(call.request)
    # What keeps it from starting is told by a status: after that there are only events.
    await sandbox.wake()
    session = None if id is None else await open_session(sandbox, id)
    if cwd is not None:
        cwd = await contained(sandbox, cwd)
    timeout = None if body.timeout_ms is None else body.timeout_ms / 1000

    def start() -> ByteStream:
        where = WORKSPACE if cwd is None and session is None else cwd
        return sandbox.exec_bytes(body.argv, cwd=where, timeout=timeout, session=session)

    events = _events(start()) if cwd is not None else _in_workspace(sandbox, start)
    return EventResponse(call, _told(events))


async def _in_workspace(
    sandbox: Sandbox, start: Callable[[], ByteStream]
) -> AsyncGenerator[bytes, None]:
    """Run it where everything starts, also after somebody has removed that."""
    try:
        async with contextlib.aclosing(_events(start())) as events:
            async for event in events:
                yield event
            return
    except PathNotFound:
        await sandbox.mkdir(WORKSPACE, recursive=True)
    async with contextlib.aclosing(_events(start())) as events:
        async for event in events:
            yield event


async def _events(stream: ByteStream) -> AsyncGenerator[bytes, None]:
    pieces = {"stdout": WholeCharacters(), "stderr": WholeCharacters()}
    async with stream:
        async for chunk in stream:
            if data := pieces[chunk.stream].feed(chunk.data):
                yield _output(chunk.stream, data)
        for name, rest in pieces.items():
            if data := rest.finish():
                yield _output(name, data)
        yield sse.encode("exit", msgspec.json.encode({"exit_code": stream.result.exit_code}))


async def _told(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events of a command, or that it could not run, or not to its end."""
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    except SmokeboxError as error:
        wrong = isinstance(error, (InvalidOption, PathError))
        code = "exec_error" if wrong else "exec_transport_error"
        yield sse.encode("error", Refusal(500, refusal_of(error).message, code).body)


def _output(name: str, data: bytes) -> bytes:
    return sse.encode(name, base64.b64encode(data))
