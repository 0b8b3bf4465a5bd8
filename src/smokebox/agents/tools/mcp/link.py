"""One connection to an MCP server, from the handshake until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
from mcp.client import Client
from mcp_types import Implementation

from smokebox import __version__
from smokebox.agents.tools.mcp.diagnosis import Complaints, first, said
from smokebox.agents.tools.mcp.transports import transport
from smokebox.errors import ServiceUnavailable, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from mcp.client._transport import TransportStreams

    from smokebox.agents.tools.mcp.server import MCPServer
    from smokebox.sandbox.api import SandboxApi

# The library gives a process two seconds to end by itself, two after SIGTERM, two after SIGKILL.
CLOSE_TIMEOUT = 10.0


class Link:
    """A connection that was made once, and is not made again: see `Connection` for that.

    A task of its own holds it, because the library wants to be left where it was entered.
    """

    def __init__(self, server: MCPServer, sandbox: SandboxApi | None) -> None:
        self._server = server
        self._sandbox = sandbox
        self._complaints = Complaints()
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
