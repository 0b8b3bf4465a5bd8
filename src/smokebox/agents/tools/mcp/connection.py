"""One connection to an MCP server, from the handshake until either side closes it."""

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
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

    from smokebox.agents.tools.mcp.server import MCPServer, Token
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import LogChunk


_log = logging.getLogger("smokebox.mcp")

# The library allows a process two seconds to exit, two after SIGTERM, and two after SIGKILL.
CLOSE_TIMEOUT = 10.0
_KILL_GRACE = 2.0
_MAX_ERRORS = 2000
_READ_BYTES = 65536


class MCPConnection:
    """A connection that is never reestablished: `MCPClient` does that.

    A task holds it, because the library must be exited in the task that entered it.
    """

    def __init__(self, server: MCPServer, sandbox: SandboxApi | None) -> None:
        self._server = server
        self._sandbox = sandbox
        self._errors = ErrorTail()
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._task = asyncio.create_task(self._run(), name=f"mcp-{server.name}")

    @property
    def alive(self) -> bool:
        """True if the connection is not known to have ended."""
        return not self._ended and not self._task.done()

    async def client(self) -> Client:
        """Return the client after the handshake. Raises `ServiceUnavailable`."""
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

    async def refused(self) -> bool:
        """Return True if it ended because nothing listens at the URL: nothing was sent."""
        if self._server.url is None:
            return False
        if not self._task.done():
            # The client fails before the task ends.
            await asyncio.wait([self._task], timeout=1.0)
        if not self._task.done() or self._task.cancelled():
            return False
        error = self._task.exception()
        return error is not None and isinstance(_first(error), httpx2.ConnectError)

    def last_error(self) -> str:
        """Return the last line that the server wrote to stderr, or its last HTTP error."""
        return self._errors.last_line()

    def last_error_note(self) -> str:
        """Return the last error as a sentence after a space, or ""."""
        error = self.last_error()
        return f" Its last error: {error}." if error else ""

    async def aclose(self) -> None:
        """Close it, and stop a server that was started here. Safe to repeat."""
        self._stop.set()
        if not self._client.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        # Otherwise asyncio logs exceptions that were never retrieved.
        for future in (self._task, self._client):
            if future.done() and not future.cancelled():
                future.exception()
        self._errors.close()

    async def _run(self) -> None:
        info = Implementation(name="smokebox", version=__version__)
        try:
            transport = self._watch(_transport(self._server, self._sandbox, self._errors))
            async with Client(transport, client_info=info) as client:
                self._client.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if not self._client.done():
                cause = _first(error)
                if isinstance(cause, asyncio.CancelledError):
                    # A future cannot hold this one.
                    cause = ConnectionError("the connection was cancelled")
                self._client.set_exception(cause)
            if isinstance(error, asyncio.CancelledError):
                raise
            if self._client.cancelled() or self._client.exception() is None:
                raise
        finally:
            self._ended = True

    @asynccontextmanager
    async def _watch(
        self, transport: AbstractAsyncContextManager[TransportStreams]
    ) -> AsyncGenerator[TransportStreams, None]:
        def on_end() -> None:
            self._ended = True

        async with transport as (read, write):
            yield _WatchedStream(read, on_end), write

    def _unavailable(self, error: BaseException) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"the MCP server {self._server.name!r} cannot be reached: {_describe(error)}."
            f"{self.last_error_note()}",
            hint="Check its command or URL, and that it runs.",
            service=self._server.name,
        )


class _WatchedStream:
    """A stream of messages that calls `on_end` at its end."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._on_end()
            raise

    async def __aenter__(self) -> _WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> Any:
        return await self._stream.__aexit__(*details)


class ErrorTail:
    """The last errors of a server: the end of its stderr, or HTTP errors."""

    def __init__(self) -> None:
        self._text = ""
        self._pipe: tuple[int, TextIO] | None = None

    def add(self, text: str) -> None:
        """Append text."""
        self._text = (self._text + text)[-_MAX_ERRORS:]

    def file(self) -> TextIO:
        """Return a pipe as the stderr of a process on this host; a file would grow forever."""
        if self._pipe is None:
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            self._pipe = reading, os.fdopen(writing, "w")
            asyncio.get_running_loop().add_reader(reading, self._read, reading)
        return self._pipe[1]

    def last_line(self) -> str:
        """Return the last line that is not blank, or ""."""
        if self._pipe is not None:
            self._read(self._pipe[0])
        lines = reversed(self._text.splitlines())
        return next((line.strip() for line in lines if line.strip()), "")

    def close(self) -> None:
        """Close the pipe."""
        if self._pipe is not None:
            reading, writing = self._pipe
            self._pipe = None
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)
            writing.close()

    def _read(self, reading: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self.add(os.read(reading, _READ_BYTES).decode(errors="replace"))


def _describe(error: BaseException) -> str:
    cause = _first(error)
    if isinstance(cause, SmokeboxError):
        return cause.message
    if isinstance(cause, TimeoutError):
        return "it did not respond in time"
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _first(error: BaseException) -> BaseException:
    """Return the first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _transport(
    server: MCPServer, sandbox: SandboxApi | None, errors: ErrorTail
) -> AbstractAsyncContextManager[TransportStreams]:
    """Return the transport of a server. Raises `Unsupported` for a sandbox without processes."""
    if server.url is not None:
        return _http(server, errors)
    if not server.in_sandbox:
        return _host_process(server, server.cwd, errors)
    # A view has no processes: they start in the sandbox, at the directory of the view.
    target = sandbox._sandbox if isinstance(sandbox, WorkspaceView) else sandbox
    cwd = "." if sandbox is None else sandbox.resolve_path(server.cwd or ".")
    if isinstance(target, LocalSandbox):
        return _host_process(server, cwd, errors)
    if not hasattr(target, "start_process"):
        raise Unsupported(
            f"the MCP server {server.name!r} runs in the sandbox, and this one has no processes.",
            hint="Use a Linux sandbox (get_sandbox), or remove in_sandbox.",
            operation="start_process",
            sandbox=type(target).__name__,
        )
    starter = cast("_ProcessStarter", target)
    return _sandbox_process(starter, server.argv, cwd=cwd, env=server.env, errors=errors)


def _host_process(
    server: MCPServer, cwd: str | None, errors: ErrorTail
) -> AbstractAsyncContextManager[TransportStreams]:
    program, *arguments = server.argv
    env = dict(server.env or {})
    parameters = StdioServerParameters(command=program, args=arguments, env=env, cwd=cwd)
    return stdio_client(parameters, errlog=errors.file())


@asynccontextmanager
async def _http(server: MCPServer, errors: ErrorTail) -> AsyncGenerator[TransportStreams, None]:
    auth = None if server.token is None else _BearerAuth(server.token)
    headers = dict(server.headers or {})

    async def record_error(response: httpx2.Response) -> None:
        # The exceptions of the library do not have the status.
        if response.status_code >= 400:
            errors.add(f"HTTP {response.status_code} {response.reason_phrase}\n")

    async with (
        create_mcp_http_client(headers=headers, auth=auth) as client,
        streamable_http_client(str(server.url), http_client=client) as streams,
    ):
        client.event_hooks["response"].append(record_error)
        yield streams


class _BearerAuth(httpx2.Auth):
    """Adds a token to each request, and repeats a refused request with a new token."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        request.headers["Authorization"] = f"Bearer {await self._get_token()}"
        response = yield request
        if response.status_code == 401 and callable(self._token):
            request.headers["Authorization"] = f"Bearer {await self._get_token()}"
            yield request

    async def _get_token(self) -> str:
        if isinstance(self._token, str):
            return self._token
        token: Any = self._token()
        return str(await token if inspect.isawaitable(token) else token)


class _SandboxProcess(Protocol):
    """The methods that are used of a process in a sandbox."""

    def stream_logs(
        self, *, replay: bool = True, follow: bool = True
    ) -> AsyncGenerator[LogChunk, None]: ...

    async def write_stdin(self, data: str | bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    async def kill(
        self, signal: str | int | None = None, *, grace: float | None = None
    ) -> None: ...


class _ProcessStarter(Protocol):
    """A sandbox that has processes."""

    async def start_process(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> _SandboxProcess: ...


@asynccontextmanager
async def _sandbox_process(
    sandbox: _ProcessStarter,
    argv: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    errors: ErrorTail,
) -> AsyncGenerator[TransportStreams, None]:
    """Start a server in a sandbox, and kill it with its children at the end."""
    process = await sandbox.start_process(argv, cwd=cwd, env=env, stdin=True)
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_receive, process, incoming, errors)
            tasks.start_soon(_send, process, outgoing, incoming)
            try:
                yield read, write
            finally:
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), contextlib.suppress(SmokeboxError):
            await process.close_stdin()
        with anyio.CancelScope(shield=True), contextlib.suppress(SmokeboxError):
            await process.kill(grace=_KILL_GRACE)
        for stream in (incoming, read, write, outgoing):
            cast("MemoryObjectSendStream[object]", stream).close()


async def _receive(
    process: _SandboxProcess,
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
    errors: ErrorTail,
) -> None:
    rest = ""
    async with incoming, aclosing(process.stream_logs()) as chunks:
        async for chunk in chunks:
            if chunk.stream != "stdout":
                errors.add(chunk.data)
                continue
            if chunk.dropped:
                # A message is missing: end the connection instead of waiting for it.
                _log.warning("output of an MCP server was dropped: it was written too fast")
                return
            *lines, rest = (rest + chunk.data).split("\n")
            for line in filter(str.strip, lines):
                await incoming.send(_parse(line))


async def _send(
    process: _SandboxProcess,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    async with outgoing:
        async for message in outgoing:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await process.write_stdin(line + "\n")
            except SmokeboxError:
                # The process has exited or does not read: end the connection.
                await incoming.aclose()
                return


def _parse(line: str) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error
