"""A client of one sandbox of a test server, with access to the sandbox in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import aiohttp
    from multidict import CIMultiDictProxy

    from smokebox.engine import Sandbox
    from smokebox.server.server import RunningServer

# A request that takes longer hangs.
DEADLINE = 10.0


class Response(NamedTuple):
    """A response, with its JSON if it has any."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes
    json: Any

    @property
    def code(self) -> str:
        """The code of its error."""
        return str(self.json["error"]["code"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxClient:
    """An HTTP client of one sandbox; `engine` is the sandbox in the engine of the server."""

    id: str
    http: aiohttp.ClientSession
    socket: str
    engine: Sandbox

    def url(self, path: str = "") -> str:
        """Return the URL of a path below the sandbox."""
        return f"/api/sandboxes/{self.id}/{path}"

    async def request(self, method: str, path: str, **options: Any) -> Response:
        """Send a request and read the whole response. Options are those of aiohttp."""
        if isinstance(options.get("data"), bytes):
            # aiohttp warns of long bodies of type bytes.
            options["data"] = io.BytesIO(options["data"])
        async with (
            asyncio.timeout(DEADLINE),
            self.http.request(method, self.url(path), **options) as response,
        ):
            body = await response.read()
            is_json = response.content_type == "application/json" and body
            json = await response.json() if is_json else None
            return Response(response.status, response.headers, body, json)

    async def read(self, path: str, **headers: str) -> Response:
        """GET a file."""
        return await self.request("GET", "files", params={"path": path}, headers=headers)

    async def write(self, path: str, data: Any, **query: str) -> Response:
        """PUT a file."""
        return await self.request("PUT", "files", params={"path": path, **query}, data=data)

    async def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return await self.engine.files.readdir(path)

    @contextlib.asynccontextmanager
    async def connection(
        self, head: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection and send the lines of `head`. Aborted at the end."""
        reader, writer = await asyncio.open_unix_connection(self.socket, limit=1 << 16)
        try:
            method, _, rest = head.partition(" ")
            first, _, fields = rest.partition("\n")
            lines = [f"{method} {self.url(first)} HTTP/1.1", "host:localhost", *fields.split()]
            writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
            yield reader, writer
        finally:
            writer.transport.abort()

    async def wait_idle(self, open_files: int) -> None:
        """Wait until no file operation runs and at most `open_files` descriptors are open."""
        await eventually(lambda: not self.engine.files.busy)
        await eventually(lambda: count_open_files() <= open_files)


async def create_sandbox_client(
    server: RunningServer, http: aiohttp.ClientSession
) -> SandboxClient:
    """Create the sandbox `box`, and return a client of it."""
    async with http.put("/api/sandboxes/box", json={}) as response:
        assert response.status == 200
    engine = server.state.host.sandbox("box")
    return SandboxClient(id="box", http=http, socket=server.socket, engine=engine)


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until `check` returns true, at most `DEADLINE` seconds."""
    deadline = time.monotonic() + DEADLINE
    while not check():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.01)


def count_open_files() -> int:
    """Return the number of open descriptors of this process, in which the server runs."""
    return len(os.listdir("/proc/self/fd"))
