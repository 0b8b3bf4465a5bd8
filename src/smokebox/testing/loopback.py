"""HTTP server on the loopback interface, for the fake and recorded model providers."""

from __future__ import annotations

import abc
import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from smokebox.sandbox.background_loop import BackgroundLoop

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Mapping
    from types import TracebackType

    from starlette.types import ASGIApp, Receive, Scope, Send


class CutConnection(Exception):
    """Raised by a response to reset its connection instead of completing."""


@dataclass(frozen=True, slots=True)
class ChunkedResponse:
    """ASGI response sent in chunks, one of which may raise `CutConnection`."""

    chunks: AsyncIterable[bytes]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class LoopbackServer(abc.ABC):
    """Server that runs for the duration of a block.

    `async with` runs it on the current event loop, `with` on a background thread.
    """

    _origin = ""
    _server: asyncio.Server | None = None
    _thread: BackgroundLoop | None = None

    @abc.abstractmethod
    async def respond(self, request: Request) -> ASGIApp:
        """Return the response to a request."""

    async def start(self, port: int = 0) -> None:
        """Listen on a port, by default any free one."""
        # uvicorn's protocol without its `Server`, which polls for its end every 100 ms.
        config = uvicorn.Config(
            self._serve,
            interface="asgi3",
            http="httptools",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=60,
        )
        self._state = ServerState()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpToolsProtocol(config, self._state, {}), "127.0.0.1", port
        )
        host, bound = self._server.sockets[0].getsockname()
        self._origin = f"http://{host}:{bound}"

    async def stop(self) -> None:
        """Close the socket and all connections, and cancel pending requests."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        while connections := list(self._state.connections):
            for connection in connections:
                connection.transport.abort()
            await asyncio.sleep(0)
        if tasks := list(self._state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.respond(Request(scope, receive))
            await response(scope, receive, send)
        except CutConnection:
            for connection in list(self._state.connections):
                if getattr(connection, "client", None) == scope["client"]:
                    connection.transport.abort()
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            # Cancelled by `stop`; uvicorn would log it as an error of the application.
            pass

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        self._thread = BackgroundLoop()
        self._thread.run(self.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.run(self.__aexit__(kind, error, trace))
            self._thread.close()
            self._thread = None
