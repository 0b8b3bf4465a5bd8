"""One connection to an MCP server, from the handshake until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

import anyio
import httpx2
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import SessionMessage
from mcp_types import Implementation, jsonrpc_message_adapter

from smokebox import __version__
from smokebox.agents.workspace import WorkspaceView
from smokebox.errors import ServiceUnavailable, SmokeboxError, Unsupported
from smokebox.sandbox.local import LocalSandbox

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

    from smokebox.agents.tools.mcp.server import MCPServer, Token
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import LogChunk


_MOST = 2000
_READ = 65536


class StderrTail:
    """The end of what a server wrote to its standard error."""

    def __init__(self) -> None:
        self._text = ""
        self._pipe: tuple[int, TextIO] | None = None

    def add(self, text: str) -> None:
        """Take what was written."""
        self._text = (self._text + text)[-_MOST:]

    def file(self) -> TextIO:
        """What a process of this host can write to: a pipe, as a file would grow for ever."""
        if self._pipe is None:
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            self._pipe = reading, os.fdopen(writing, "w")
            asyncio.get_running_loop().add_reader(reading, self._read, reading)
        return self._pipe[1]

    def last_line(self) -> str:
        """The last line that says something, or nothing."""
        if self._pipe is not None:
            self._read(self._pipe[0])
        lines = reversed(self._text.splitlines())
        return next((line.strip() for line in lines if line.strip()), "")

    def close(self) -> None:
        """Let go of the pipe."""
        if self._pipe is not None:
            reading, writing = self._pipe
            self._pipe = None
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)
            writing.close()

    def _read(self, reading: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self.add(os.read(reading, _READ).decode(errors="replace"))


def said(error: BaseException) -> str:
    """What went wrong, out of as many groups as it may be in."""
    cause = first(error)
    if isinstance(cause, SmokeboxError):
        return cause.message
    if isinstance(cause, TimeoutError):
        return "it did not answer in time"
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def first(error: BaseException) -> BaseException:
    """The first error that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


_log = logging.getLogger("smokebox.mcp")
GRACE = 2.0


class MCPProcess(Protocol):
    """What is needed of a process in a sandbox."""

    def stream_logs(
        self, *, replay: bool = True, follow: bool = True
    ) -> AsyncGenerator[LogChunk, None]: ...

    async def write_stdin(self, data: str | bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    async def kill(
        self, signal: str | int | None = None, *, grace: float | None = None
    ) -> None: ...


class MCPStarter(Protocol):
    """A sandbox that has processes."""

    async def start_process(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> MCPProcess: ...


@asynccontextmanager
async def pipe(
    sandbox: MCPStarter,
    words: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    complaints: StderrTail,
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
    process: MCPProcess,
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
    complaints: StderrTail,
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
    process: MCPProcess,
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


def transport(
    server: MCPServer, sandbox: SandboxApi | None, complaints: StderrTail
) -> AbstractAsyncContextManager[TransportStreams]:
    """The way to a server. Raises `Unsupported` for a sandbox that has no processes."""
    if server.url is not None:
        return _http(server, complaints)
    if not server.in_sandbox:
        return _host(server, server.cwd, dict(server.env or {}), complaints)
    # A view has no processes of its own, and says where those of its sandbox begin.
    machine = sandbox._sandbox if isinstance(sandbox, WorkspaceView) else sandbox
    cwd = "." if sandbox is None else sandbox.resolve_path(server.cwd or ".")
    if isinstance(machine, LocalSandbox):
        return _host(server, cwd, dict(server.env or {}), complaints)
    if not hasattr(machine, "start_process"):
        raise Unsupported(
            f"the MCP server {server.name!r} is to run in the sandbox, and this one has no "
            "processes.",
            hint="Use a Linux sandbox (get_sandbox), or leave in_sandbox out.",
            operation="start_process",
            sandbox=type(machine).__name__,
        )
    starter = cast("MCPStarter", machine)
    return pipe(starter, server.words, cwd=cwd, env=server.env, complaints=complaints)


def _host(
    server: MCPServer, cwd: str | None, env: dict[str, str], complaints: StderrTail
) -> AbstractAsyncContextManager[TransportStreams]:
    program, *arguments = server.words
    parameters = StdioServerParameters(command=program, args=arguments, env=env, cwd=cwd)
    return stdio_client(parameters, errlog=complaints.file())


@asynccontextmanager
async def _http(
    server: MCPServer, complaints: StderrTail
) -> AsyncGenerator[TransportStreams, None]:
    auth = None if server.token is None else _Bearer(server.token)
    headers = dict(server.headers or {})

    async def note(response: httpx2.Response) -> None:
        # The library tells of an error, and not which.
        if response.status_code >= 400:
            complaints.add(f"HTTP {response.status_code} {response.reason_phrase}\n")

    async with (
        create_mcp_http_client(headers=headers, auth=auth) as client,
        streamable_http_client(str(server.url), http_client=client) as streams,
    ):
        client.event_hooks["response"].append(note)
        yield streams


class _Bearer(httpx2.Auth):
    """Asks for a token with each request, and for another one when it is refused."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        request.headers["Authorization"] = f"Bearer {await self._ask()}"
        response = yield request
        if response.status_code == 401 and callable(self._token):
            request.headers["Authorization"] = f"Bearer {await self._ask()}"
            yield request

    async def _ask(self) -> str:
        if isinstance(self._token, str):
            return self._token
        given: Any = self._token()
        return str(await given if inspect.isawaitable(given) else given)


# The library gives a process two seconds to end by itself, two after SIGTERM, two after SIGKILL.
CLOSE_TIMEOUT = 10.0


class MCPLink:
    """A connection that was made once, and is not made again: see `Connection` for that.

    A task of its own holds it, because the library wants to be left where it was entered.
    """

    def __init__(self, server: MCPServer, sandbox: SandboxApi | None) -> None:
        self._server = server
        self._sandbox = sandbox
        self._complaints = StderrTail()
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._task = asyncio.create_task(self._hold(), name=f"mcp-{server.name}")

    @property
    def alive(self) -> bool:
        """Whether nobody has ended it, as far as is known."""
        return not self._ended and not self._task.done()

    async def client(self) -> Client:
        """The client, once the handshake is done. Raises `ServiceUnavailable`."""
        try:
            async with asyncio.timeout(self._server.connect_timeout):
                return await asyncio.shield(self._client)
        except TimeoutError as error:
            self._task.cancel()
            raise self._unavailable(error) from error
        except SmokeboxError:
            raise
        except Exception as error:
            raise self._unavailable(error) from error

    async def _why(self) -> BaseException | None:
        """What ended it, if that was an error."""
        if not self._task.done():
            with contextlib.suppress(TimeoutError):
                # It is on its way out: the client is told before the task ends.
                async with asyncio.timeout(1.0):
                    await asyncio.wait([self._task])
        if not self._task.done() or self._task.cancelled():
            return None
        error = self._task.exception()
        return None if error is None else first(error)

    async def refused(self) -> bool:
        """Whether it ended because nobody answered at the address: nothing was sent then."""
        return self._server.url is not None and isinstance(await self._why(), httpx2.ConnectError)

    def complaint(self) -> str:
        """What the server wrote to its standard error last, or refused over HTTP."""
        return self._complaints.last_line()

    async def aclose(self) -> None:
        """End it, and the process if it was one of ours. Safe to repeat."""
        self._stop.set()
        if not self._client.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # Whoever called has seen what came of it.
        if self._client.done() and not self._client.cancelled():
            self._client.exception()
        self._complaints.close()

    async def _hold(self) -> None:
        info = Implementation(name="smokebox", version=__version__)
        try:
            way = self._watched(transport(self._server, self._sandbox, self._complaints))
            async with Client(way, client_info=info) as client:
                self._client.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if not self._client.done():
                self._client.set_exception(_plain(error))
            if isinstance(error, asyncio.CancelledError):
                raise
            if self._client.cancelled() or self._client.exception() is None:
                raise
        finally:
            self._ended = True

    @asynccontextmanager
    async def _watched(
        self, way: AbstractAsyncContextManager[TransportStreams]
    ) -> AsyncGenerator[TransportStreams, None]:
        async with way as (read, write):
            yield _Watched(read, self._on_end), write

    def _on_end(self) -> None:
        self._ended = True

    def _unavailable(self, error: BaseException) -> ServiceUnavailable:
        complaint = self.complaint()
        wrote = f" Last heard of it: {complaint}." if complaint else ""
        return ServiceUnavailable(
            f"the MCP server {self._server.name!r} cannot be reached: {said(error)}.{wrote}",
            hint="See that its command or its address is right, and that it runs.",
            service=self._server.name,
        )


class _Watched:
    """What comes from a server, with a word when nothing more will."""

    def __init__(self, stream: Any, on_end: Any) -> None:
        self._stream = stream
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._on_end()
            raise

    async def __aenter__(self) -> _Watched:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> Any:
        return await self._stream.__aexit__(*details)


def _plain(error: BaseException) -> BaseException:
    """An error that a future can hold and that says something."""
    cause = first(error)
    if isinstance(cause, asyncio.CancelledError):
        return ConnectionError("the connection was given up")
    return cause
