"""MCP over the standard input and output of a process in a sandbox."""

from __future__ import annotations

import contextlib
import logging
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Protocol, cast

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

    from smokebox.agents.tools.mcp.diagnosis import Complaints
    from smokebox.types import LogChunk

_log = logging.getLogger("smokebox.mcp")
GRACE = 2.0


class Process(Protocol):
    """What is needed of a process in a sandbox."""

    def stream_logs(
        self, *, replay: bool = True, follow: bool = True
    ) -> AsyncGenerator[LogChunk, None]: ...

    async def write_stdin(self, data: str | bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    async def kill(
        self, signal: str | int | None = None, *, grace: float | None = None
    ) -> None: ...


class Starter(Protocol):
    """A sandbox that has processes."""

    async def start_process(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> Process: ...


@asynccontextmanager
async def pipe(
    sandbox: Starter,
    words: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    complaints: Complaints,
) -> AsyncGenerator[TransportStreams, None]:
    """Start a server in a sandbox, and end it with all that it started."""
    process = await sandbox.start_process(words, cwd=cwd, env=env, stdin=True)
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_receive, process, incoming, complaints)
            tasks.start_soon(_send, process, outgoing, incoming)
            try:
                yield read, write
            finally:
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), contextlib.suppress(SmokeboxError):
            await process.close_stdin()
        with anyio.CancelScope(shield=True), contextlib.suppress(SmokeboxError):
            await process.kill(grace=GRACE)
        for stream in (incoming, read, write, outgoing):
            cast("MemoryObjectSendStream[object]", stream).close()


async def _receive(
    process: Process,
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
    complaints: Complaints,
) -> None:
    rest = ""
    async with incoming, aclosing(process.stream_logs()) as chunks:
        async for chunk in chunks:
            if chunk.stream != "stdout":
                complaints.add(chunk.data)
                continue
            if chunk.dropped:
                # A message is missing: whoever waits for it must not wait for ever.
                _log.warning("an MCP server wrote faster than it was read")
                return
            *lines, rest = (rest + chunk.data).split("\n")
            for line in filter(str.strip, lines):
                await incoming.send(_parsed(line))


async def _send(
    process: Process,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    async with outgoing:
        async for message in outgoing:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await process.write_stdin(line + "\n")
            except SmokeboxError:
                # It has ended, or does not read: the session sees the connection end.
                await incoming.aclose()
                return


def _parsed(line: str) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error
