"""Background processes: start, wait, logs, stdin and signals."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    LimitReached,
    NotFound,
    PathError,
    ProcessEnded,
    SandboxGone,
    ServiceUnavailable,
    Unsupported,
)
from smokebox.foundation import sse
from smokebox.foundation.ids import new_id
from smokebox.server.endpoint import BYTES, ApiCall, endpoint
from smokebox.server.idempotency import Creation
from smokebox.server.responses import EventResponse, event
from smokebox.server.websocket import WebSocketChannel, decode_frame, websocket
from smokebox.types import LogMatch, ProcessInfo, ProcessLogs
from smokebox.wire.frames import CloseStdinFrame, ExitFrame, OutputFrame
from smokebox.wire.requests import FollowLogs, Kill, StartProcess, Wait, WaitForLog, WaitForPort
from smokebox.wire.responses import Count, ExitCode, Processes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.engine.processes.background_process import BackgroundProcess

_START_ERRORS = (InvalidOption, PathError, Conflict, LimitReached, SandboxGone, Unsupported)
_LOOKUP_ERRORS = (InvalidOption, NotFound)
_WAIT_ERRORS = (*_LOOKUP_ERRORS, DeadlineExceeded, ProcessEnded, SandboxGone)
_STDIN_ERRORS = (*_LOOKUP_ERRORS, ProcessEnded, SandboxGone, Unsupported)


@endpoint("GET", "/sandboxes/{id}/processes")
async def list_all(call: ApiCall) -> Processes:
    """List the running processes and recent ended ones, in order of their start."""
    return Processes([_info(process) for process in await call.sandbox.processes.list()])


@endpoint("POST", "/sandboxes/{id}/processes", errors=_START_ERRORS, status=201, slow=True)
async def start(call: ApiCall, body: StartProcess) -> ProcessInfo:
    """Start a process in the background.

    It outlives this request and the server. With the header Idempotency-Key the request may be
    repeated, and starts one process.
    """

    async def create_with_id(id: str) -> ProcessInfo:
        process = await call.sandbox.start_process(
            body.command,
            process_id=id,
            cwd=body.cwd,
            env=body.env,
            user=body.user,
            limits=body.limits,
            stdin=body.stdin,
            timeout=body.timeout,
        )
        return _info(process)

    async def find(id: str) -> ProcessInfo:
        return _info(await call.sandbox.processes.get(id))

    id = body.id if body.id is not None else new_id("p")
    return await call.state.idempotency.once(
        call, body, Creation(kind="process", id=id, find=find, create=create_with_id)
    )


@endpoint("DELETE", "/sandboxes/{id}/processes")
async def cleanup(call: ApiCall) -> Count:
    """Remove the records and logs of ended processes. Returns their number."""
    return Count(await call.sandbox.processes.cleanup())


@endpoint(
    "POST", "/sandboxes/{id}/processes/kill", errors=(InvalidOption, ServiceUnavailable), slow=True
)
async def kill_all(call: ApiCall, body: Kill) -> Count:
    """Kill all processes, or send a signal to all. Returns their number."""
    return Count(await call.sandbox.processes.kill_all(body.signal, **_grace(body)))


@endpoint("GET", "/sandboxes/{id}/processes/{process}", errors=_LOOKUP_ERRORS)
async def get(call: ApiCall) -> ProcessInfo:
    """Return the state of a process, running or ended."""
    return _info(await process_of(call))


@endpoint(
    "POST",
    "/sandboxes/{id}/processes/{process}/kill",
    errors=(*_LOOKUP_ERRORS, SandboxGone, ServiceUnavailable),
    slow=True,
)
async def kill(call: ApiCall, body: Kill) -> None:
    """Kill a process and its descendants, or send it a signal.

    Without a signal, SIGTERM is followed by SIGKILL after `grace` seconds, and the response
    comes when all of them have ended. Does nothing if the process has ended.
    """
    await (await process_of(call)).kill(body.signal, **_grace(body))


@endpoint("GET", "/sandboxes/{id}/processes/{process}/logs", errors=_LOOKUP_ERRORS)
async def logs(call: ApiCall) -> ProcessLogs:
    """Return the output of a process; the end of it if the log is very long."""
    return await (await process_of(call)).logs()


@endpoint(
    "GET",
    "/sandboxes/{id}/processes/{process}/logs/stream",
    errors=_LOOKUP_ERRORS,
    returns=sse.MEDIA,
)
async def stream_logs(call: ApiCall, query: FollowLogs) -> EventResponse:
    """Stream the output of a process, with `follow` until the process ends.

    Events: `output` with a piece of one stream, whose id is the cursor after it, and last
    `exit` if the process was followed to its end, or `error`. A cursor is valid as long as the
    log exists, also after a restart of the server. The header Last-Event-ID overrides `cursor`.
    """
    process = await process_of(call)
    cursor = call.request.headers.get("last-event-id") or query.cursor
    # Checked here: a stream sends its status before its first event.
    process.log.parse_cursor(cursor)
    return EventResponse(call, _log_events(process, query, cursor))


@endpoint("GET", "/sandboxes/{id}/processes/{process}/wait", errors=_WAIT_ERRORS, slow=True)
async def wait(call: ApiCall, query: Wait) -> ExitCode:
    """Wait until a process has ended, at most `timeout` seconds."""
    return ExitCode(await (await process_of(call)).wait_for_exit(query.timeout))


@endpoint(
    "POST",
    "/sandboxes/{id}/processes/{process}/wait_for_log",
    errors=_WAIT_ERRORS,
    reads=True,
    slow=True,
)
async def wait_for_log(call: ApiCall, body: WaitForLog) -> LogMatch:
    """Wait for a line in the log of a process, from the beginning of the log.

    `pattern` is text, or with `regex` a regular expression of Python.
    """
    process = await process_of(call)
    if not body.regex:
        return await process.wait_for_log(body.pattern, body.timeout)
    search = call.state.log_search
    return await search.find_line(process, body.pattern, body.flags, body.timeout)


@endpoint(
    "POST", "/sandboxes/{id}/processes/{process}/wait_for_port", errors=_WAIT_ERRORS, slow=True
)
async def wait_for_port(call: ApiCall, body: WaitForPort) -> None:
    """Wait until a port of the sandbox responds, while the process runs.

    In mode `http`, `GET path` must have a status in the range; in mode `tcp`, the port must
    accept a connection.
    """
    await (await process_of(call)).wait_for_port(
        body.port,
        mode=body.mode,
        path=body.path,
        status=body.status,
        timeout=body.timeout,
        interval=body.interval,
    )


@endpoint(
    "POST",
    "/sandboxes/{id}/processes/{process}/stdin",
    errors=_STDIN_ERRORS,
    accepts=BYTES,
    slow=True,
)
async def write_stdin(call: ApiCall, body: bytes) -> None:
    """Write the bytes of the body to the stdin of a process.

    The response comes when all of them are read or in the pipe. The process must have been
    started with `stdin`.
    """
    await (await process_of(call)).write_stdin(body)


@endpoint(
    "DELETE",
    "/sandboxes/{id}/processes/{process}/stdin",
    errors=(*_LOOKUP_ERRORS, SandboxGone),
    slow=True,
)
async def close_stdin(call: ApiCall) -> None:
    """Close the stdin of a process. Safe to repeat."""
    await (await process_of(call)).close_stdin()


@websocket("/sandboxes/{id}/processes/{process}/stdio")
async def stdio(call: ApiCall, channel: WebSocketChannel, query: FollowLogs) -> None:
    """Follow the output of a process, and write to its stdin.

    The server sends text frames: `output` for each piece, and at the end `exit`, after which
    it closes with 1000. `cursor` resumes right after an `output`. The client sends input for
    stdin as binary frames, and `close_stdin` as text. The process survives the socket.
    """
    process = await process_of(call)
    process.log.parse_cursor(query.cursor)
    await channel.accept()
    await channel.run(_send(channel, process, query), functools.partial(_receive, process))


async def process_of(call: ApiCall) -> BackgroundProcess:
    """Return the process in the path."""
    return await call.sandbox.processes.get(call.path_param("process"))


async def _log_events(
    process: BackgroundProcess, query: FollowLogs, cursor: str | None
) -> AsyncGenerator[bytes, None]:
    chunks = process.stream_logs(replay=query.replay, follow=query.follow, cursor=cursor)
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield event("output", chunk, chunk.cursor)
    if query.follow and process.exit_code is not None:
        yield event("exit", ExitCode(process.exit_code))


async def _send(channel: WebSocketChannel, process: BackgroundProcess, query: FollowLogs) -> None:
    chunks = process.stream_logs(replay=query.replay, follow=query.follow, cursor=query.cursor)
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            await channel.send(
                OutputFrame(
                    stream=chunk.stream,
                    data=chunk.data,
                    cursor=chunk.cursor,
                    dropped=chunk.dropped,
                )
            )
    if query.follow and process.exit_code is not None:
        await channel.send(ExitFrame(exit_code=process.exit_code))


async def _receive(process: BackgroundProcess, frame: bytes | str) -> None:
    if isinstance(frame, bytes):
        await process.write_stdin(frame)
    else:
        decode_frame(CloseStdinFrame, frame)
        await process.close_stdin()


def _grace(body: Kill) -> dict[str, Any]:
    return {} if body.grace is None else {"grace": body.grace}


def _info(process: BackgroundProcess) -> ProcessInfo:
    return ProcessInfo(
        id=process.id,
        command=process.row.command,
        status=process.status,
        pid=process.pid,
        exit_code=process.exit_code,
        started_at=process.row.started_at,
        ended_at=process.row.ended_at,
        generation=process.row.generation,
        stdin=process.row.stdin,
    )


ENDPOINTS = [
    list_all,
    start,
    cleanup,
    kill_all,
    get,
    kill,
    logs,
    stream_logs,
    wait,
    wait_for_log,
    wait_for_port,
    write_stdin,
    close_stdin,
]
SOCKETS = [stdio]
