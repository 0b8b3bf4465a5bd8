"""Commands, with their output as server-sent events."""

from __future__ import annotations

import base64
import codecs
import contextlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from smokebox.errors import InvalidOption, PathError, PathNotFound, SmokeboxError
from smokebox.foundation import sse
from smokebox.server.compat.bridge.errors import BridgeError, bridge_error
from smokebox.server.compat.bridge.names import (
    WORKSPACE,
    open_session,
    requested_session,
    resolve_contained,
    sandbox_of,
    workspace_path,
)
from smokebox.server.compat.bridge.route import bridge_route
from smokebox.server.endpoint import ApiCall
from smokebox.server.responses import EventResponse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from smokebox.engine import Sandbox
    from smokebox.runtime.stream import ByteStream


# For the schema only: `run` has a better message.
_POSITIVE = msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0})


class ExecBody(msgspec.Struct):
    """A command as a list of arguments, which no shell interprets.

    `cwd` is a path in /workspace. `argv` is required.
    """

    argv: Annotated[list[str], msgspec.Meta(extra_json_schema={"minItems": 1})] = []
    timeout_ms: Annotated[float, _POSITIVE] | None = None
    cwd: str | None = None


@bridge_route(
    "POST",
    "/v1/sandbox/{id}/exec",
    "execCommand",
    returns=sse.MEDIA,
    errors=(400, 403),
    session=True,
)
async def run(call: ApiCall, body: ExecBody) -> EventResponse:
    """Run a command and stream its output.

    The events `stdout` and `stderr` carry base64. The last event is `exit` with `exit_code`, or
    `error`. After `timeout_ms`, or when the client disconnects, the command is killed; a timeout
    has exit code 124.
    """
    if not body.argv:
        raise BridgeError(400, "argv must be a non-empty array")
    if body.timeout_ms is not None and not 0 < body.timeout_ms < float("inf"):
        raise BridgeError(400, f"timeout_ms must be a positive number, not {body.timeout_ms}")
    id = requested_session(call.request)
    cwd = None if body.cwd is None else workspace_path(body.cwd)
    sandbox = sandbox_of(call.request)
    # Errors of starting the sandbox get a status: after that there are only events.
    await sandbox.wake()
    session = None if id is None else await open_session(sandbox, id)
    if cwd is not None:
        cwd = await resolve_contained(sandbox, cwd)
    timeout = None if body.timeout_ms is None else body.timeout_ms / 1000

    def start() -> ByteStream:
        where = WORKSPACE if cwd is None and session is None else cwd
        return sandbox.exec_bytes(body.argv, cwd=where, timeout=timeout, session=session)

    events = _events(start()) if cwd is not None else _in_workspace(sandbox, start)
    return EventResponse(call, _with_error_event(events))


async def _in_workspace(
    sandbox: Sandbox, start: Callable[[], ByteStream]
) -> AsyncGenerator[bytes, None]:
    """Run a command in the workspace, and create the workspace if it was removed."""
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
    pieces = {"stdout": CharacterBuffer(), "stderr": CharacterBuffer()}
    async with stream:
        async for chunk in stream:
            if data := pieces[chunk.stream].feed(chunk.data):
                yield _output(chunk.stream, data)
        for name, rest in pieces.items():
            if data := rest.finish():
                yield _output(name, data)
        yield sse.encode("exit", msgspec.json.encode({"exit_code": stream.result.exit_code}))


async def _with_error_event(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield events, and an error event if the command cannot run or finish."""
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    except SmokeboxError as error:
        invalid = isinstance(error, (InvalidOption, PathError))
        code = "exec_error" if invalid else "exec_transport_error"
        yield sse.encode("error", BridgeError(500, bridge_error(error).message, code).body)


def _output(name: str, data: bytes) -> bytes:
    return sse.encode(name, base64.b64encode(data))


_decoder = codecs.getincrementaldecoder("utf-8")
# A character has at most four bytes, so an incomplete one has at most three.
_LONGEST_INCOMPLETE = 3


class CharacterBuffer:
    """Holds back an incomplete character; bytes that are not UTF-8 pass unchanged."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes held back and `data`, up to the last complete character."""
        data = self._held + data
        decoder = _decoder("replace")
        decoder.decode(data[-_LONGEST_INCOMPLETE:])
        cut = len(data) - len(decoder.getstate()[0])
        self._held = data[cut:]
        return data[:cut]

    def finish(self) -> bytes:
        """Return the remaining bytes of an incomplete character."""
        held, self._held = self._held, b""
        return held
