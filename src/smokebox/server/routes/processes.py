"""Processes that run on by themselves: started, waited for, talked to, ended."""

from __future__ import annotations

import contextlib
import functools
import secrets
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from smokebox.engine.processes.logs import start_of
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
from smokebox.server.call import Call
from smokebox.server.endpoint import BYTES, endpoint
from smokebox.server.events import EventResponse, event
from smokebox.server.idempotency import Making
from smokebox.server.patience import answer_patiently
from smokebox.server.sockets import Channel, decode_frame, socket
from smokebox.types import LogMatch, ProcessInfo, ProcessLogs
from smokebox.wire import sse
from smokebox.wire.answers import Count, ExitCode, Processes
from smokebox.wire.frames import CloseStdinFrame, ExitFrame, OutputFrame
from smokebox.wire.requests import FollowLogs, Kill, StartProcess, Wait, WaitForLog, WaitForPort

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from smokebox.engine.processes.lasting import LastingProcess

_STARTING = (InvalidOption, PathError, Conflict, LimitReached, SandboxGone, Unsupported)
_NAMING = (InvalidOption, NotFound)
_WAITING = (*_NAMING, DeadlineExceeded, ProcessEnded, SandboxGone)
_TYPING = (*_NAMING, ProcessEnded, SandboxGone, Unsupported)


@endpoint("GET", "/sandboxes/{id}/processes")
async def list_all(call: Call) -> Processes:
    """List the processes that run, and those kept of the ended, in the order of their start."""
    return Processes([_info(process) for process in await call.sandbox.processes.list()])


@endpoint("POST", "/sandboxes/{id}/processes", errors=_STARTING, status=201, slow=True)
async def start(call: Call, body: StartProcess) -> ProcessInfo:
    """Start a command that runs on by itself.

    It outlives this request, and the server. With the header Idempotency-Key the request
    may be repeated, and starts one.
    """

    async def make(id: str) -> ProcessInfo:
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

    id = body.id if body.id is not None else f"p-{secrets.token_hex(6)}"
    making = Making(kind="process", id=id, find=find, make=make)
    return await call.state.requests.once(call, body, making)


@endpoint("DELETE", "/sandboxes/{id}/processes")
async def cleanup(call: Call) -> Count:
    """Forget the processes that have ended, with their logs."""
    return Count(await call.sandbox.processes.cleanup())


@endpoint(
    "POST", "/sandboxes/{id}/processes/kill", errors=(InvalidOption, ServiceUnavailable), slow=True
)
async def kill_all(call: Call, body: Kill) -> Count:
    """End all processes, or send all a signal; how many there were to end."""
    return Count(await call.sandbox.processes.kill_all(body.signal, **_grace(body)))


@endpoint("GET", "/sandboxes/{id}/processes/{process}", errors=_NAMING)
async def get(call: Call) -> ProcessInfo:
    """What is known of a process, also of one that has ended."""
    return _info(await process_of(call))


@endpoint(
    "POST",
    "/sandboxes/{id}/processes/{process}/kill",
    errors=(*_NAMING, SandboxGone, ServiceUnavailable),
    slow=True,
)
async def kill(call: Call, body: Kill) -> None:
    """End a process with all that it started, or send it a signal.

    Without a signal, SIGTERM comes first and SIGKILL after `grace` seconds, and the answer
    when nothing of it is left. What has ended is left alone.
    """
    await (await process_of(call)).kill(body.signal, **_grace(body))


@endpoint("GET", "/sandboxes/{id}/processes/{process}/logs", errors=_NAMING)
async def logs(call: Call) -> ProcessLogs:
    """What a process has written; of a very long log the end."""
    return await (await process_of(call)).logs()


@endpoint("GET", "/sandboxes/{id}/processes/{process}/logs/stream", errors=_NAMING, gives=sse.MEDIA)
async def stream_logs(call: Call, query: FollowLogs) -> EventResponse:
    """Give what a process has written, and with `follow` what it writes until it ends.

    Events: `output` with a piece of one stream, whose id is the cursor after it, and last
    `exit` if it was followed to its end, or `error`. A cursor is good for as long as the
    log is there, also for another server on the same state directory. The header
    Last-Event-ID goes before `cursor`.
    """
    process = await process_of(call)
    cursor = call.request.headers.get("last-event-id") or query.cursor
    # Here and not by the stream, whose status is sent before its first event.
    start_of(process.log, cursor)
    return EventResponse(call, _log_events(process, query, cursor))


@endpoint("GET", "/sandboxes/{id}/processes/{process}/wait", errors=_WAITING, slow=True)
async def wait(call: Call, query: Wait) -> ExitCode:
    """Wait until a process has ended, for `timeout` seconds at most."""
    return ExitCode(await (await process_of(call)).wait_for_exit(query.timeout))


@endpoint("POST", "/sandboxes/{id}/processes/{process}/wait_for_log", errors=_WAITING, slow=True)
async def wait_for_log(call: Call, body: WaitForLog) -> LogMatch:
    """Wait for a line in the log of a process, from the log's beginning on.

    `pattern` is text, or with `regex` a regular expression as Python has them.
    """
    process = await process_of(call)
    if not body.regex:
        return await process.wait_for_log(body.pattern, body.timeout)
    patterns = call.state.patterns
    return await patterns.find_line(process, body.pattern, body.flags, body.timeout)


@endpoint("POST", "/sandboxes/{id}/processes/{process}/wait_for_port", errors=_WAITING, slow=True)
async def wait_for_port(call: Call, body: WaitForPort) -> None:
    """Wait until a port of the sandbox answers, while the process runs.

    In the mode `http` to `GET path` with a status in the range, in `tcp` to a connection.
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
    errors=_TYPING,
    takes=BYTES,
    status=204,
)
async def write_stdin(call: Call) -> Response:
    """Write to the stdin of a process: the bytes of the body, as they are.

    The answer comes when all of them are read or in the pipe. The process must have been
    started with `stdin`.
    """
    process = await process_of(call)
    data = await call.body()
    return _Patient(functools.partial(process.write_stdin, data))


@endpoint(
    "DELETE", "/sandboxes/{id}/processes/{process}/stdin", errors=(*_NAMING, SandboxGone), slow=True
)
async def close_stdin(call: Call) -> None:
    """End of file for a process. Safe to repeat."""
    await (await process_of(call)).close_stdin()


@socket("/sandboxes/{id}/processes/{process}/stdio")
async def stdio(call: Call, channel: Channel, query: FollowLogs) -> None:
    """Follow what a process writes, and write to its stdin.

    The server sends text frames: `output` for each piece, and at the end `exit`, after which
    it closes with 1000. `cursor` goes on right after an `output`. The client sends what is for
    stdin as binary frames, and `close_stdin` as text. The process stays when the socket closes.
    """
    process = await process_of(call)
    start_of(process.log, query.cursor)
    await channel.accept()
    await channel.converse(_talk(channel, process, query), functools.partial(_hear, process))


async def process_of(call: Call) -> LastingProcess:
    """The process of the path."""
    return await call.sandbox.processes.get(call.part("process"))


class _Patient(Response):
    """What `slow` is for an endpoint that reads its body itself: done once all of it is here."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        super().__init__(status_code=204)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_patiently(
            scope, receive, send, self._work, lambda _: Response(status_code=204)
        )


async def _log_events(
    process: LastingProcess, query: FollowLogs, cursor: str | None
) -> AsyncGenerator[bytes, None]:
    chunks = process.stream_logs(replay=query.replay, follow=query.follow, cursor=cursor)
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield event("output", chunk, chunk.cursor)
    if query.follow and process.exit_code is not None:
        yield event("exit", ExitCode(process.exit_code))


async def _talk(channel: Channel, process: LastingProcess, query: FollowLogs) -> None:
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


async def _hear(process: LastingProcess, frame: bytes | str) -> None:
    if isinstance(frame, bytes):
        await process.write_stdin(frame)
    else:
        decode_frame(CloseStdinFrame, frame)
        await process.close_stdin()


def _grace(body: Kill) -> dict[str, Any]:
    return {} if body.grace is None else {"grace": body.grace}


def _info(process: LastingProcess) -> ProcessInfo:
    return ProcessInfo(
        id=process.id,
        command=process.command,
        status=process.status,
        pid=process.pid,
        exit_code=process.exit_code,
        started_at=process.started_at,
        ended_at=process.ended_at,
        generation=process.generation,
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
