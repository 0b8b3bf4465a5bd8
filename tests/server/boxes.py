"""A sandbox behind a server, as tests of its files use it: by HTTP, and by looking inside."""

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

# No request of these tests takes long: one that does hangs.
DEADLINE = 10.0


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes
    json: Any

    @property
    def code(self) -> str:
        """The code of the error that it is."""
        return str(self.json["error"]["code"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A sandbox: `ask` it by HTTP; `engine` is what the server has of it."""

    id: str
    http: aiohttp.ClientSession
    socket: str
    engine: Sandbox

    def url(self, path: str = "") -> str:
        """Where something of the sandbox is."""
        return f"/api/sandboxes/{self.id}/{path}"

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request and read the whole answer; keywords are aiohttp's."""
        if isinstance(options.get("data"), bytes):
            # aiohttp warns of long bytes as they are.
            options["data"] = io.BytesIO(options["data"])
        async with (
            asyncio.timeout(DEADLINE),
            self.http.request(method, self.url(path), **options) as answer,
        ):
            body = await answer.read()
            is_json = answer.content_type == "application/json" and body
            return Answer(
                answer.status, answer.headers, body, await answer.json() if is_json else None
            )

    async def read(self, path: str, **headers: str) -> Answer:
        """GET a file."""
        return await self.ask("GET", "files", params={"path": path}, headers=headers)

    async def write(self, path: str, data: Any, **query: str) -> Answer:
        """PUT a file."""
        return await self.ask("PUT", "files", params={"path": path, **query}, data=data)

    async def names(self, path: str) -> list[str]:
        """The names in a directory."""
        return await self.engine.files.readdir(path)

    @contextlib.asynccontextmanager
    async def connection(
        self, head: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection of its own, on which the lines of `head` were sent. Closed rudely."""
        reader, writer = await asyncio.open_unix_connection(self.socket, limit=1 << 16)
        try:
            method, _, rest = head.partition(" ")
            first, _, fields = rest.partition("\n")
            lines = [f"{method} {self.url(first)} HTTP/1.1", "host:localhost", *fields.split()]
            writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode())
            yield reader, writer
        finally:
            writer.transport.abort()

    async def settled(self, opened: int) -> None:
        """Wait until nothing of a request is left: no work, and as many open files as before."""
        await eventually(lambda: not self.engine.files.busy)
        await eventually(lambda: open_files() <= opened)


async def make_box(server: RunningServer, http: aiohttp.ClientSession) -> Box:
    """A sandbox that is awake."""
    async with http.put("/api/sandboxes/box", json={}) as answer:
        assert answer.status == 200
    engine = server.state.host.sandbox("box")
    return Box(id="box", http=http, socket=server.socket, engine=engine)


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + DEADLINE
    while not check():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


def open_files() -> int:
    """How many files this process, which the server is in, has open."""
    return len(os.listdir("/proc/self/fd"))
