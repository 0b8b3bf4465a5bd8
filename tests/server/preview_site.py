"""A preview of the app in `preview_app`, and an HTTP client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yarl import URL

from server import preview_app
from smokebox.wire.preview import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from smokebox.engine import Sandbox
    from smokebox.server.server import RunningServer

APP = Path(preview_app.__file__).read_text()
BROWSER = {"accept": "text/html,application/xhtml+xml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A preview and an HTTP client for it; `url` is the one that the server returned.

    Requests have the token in the header for programs; a header of None is left out.
    """

    server: RunningServer
    sandbox: Sandbox
    http: aiohttp.ClientSession
    url: str

    @property
    def host(self) -> str:
        return URL(self.url).authority

    @property
    def headers(self) -> dict[str, str]:
        return {"host": self.host, TOKEN_HEADER: self.token}

    @property
    def head(self) -> str:
        """The lines of a request that let it in."""
        return f"host: {self.host}\r\n{TOKEN_HEADER}: {self.token}\r\n"

    @property
    def token(self) -> str:
        return URL(self.url).query.get("token", "")

    @property
    def label(self) -> str:
        return self.host.partition(".")[0]

    @property
    def origin(self) -> str:
        """The address to connect to: not every resolver knows subdomains of localhost."""
        assert self.server.url is not None
        return self.server.url

    def request(self, method: str, path: str, **options: Any) -> Any:
        changed = {**self.headers, **options.pop("headers", {})}
        headers = {name: value for name, value in changed.items() if value is not None}
        options.setdefault("allow_redirects", False)
        url = URL(self.origin + path, encoded=True)
        return self.http.request(method, url, headers=headers, **options)

    async def get(self, path: str, **options: Any) -> Response:
        async with asyncio.timeout(10), self.request("GET", path, **options) as response:
            return Response(response.status, response.headers, await response.read())

    async def post(self, path: str, data: Any, **options: Any) -> Any:
        async with (
            asyncio.timeout(10),
            self.request("POST", path, data=data, **options) as response,
        ):
            return json.loads(await response.read())

    async def api(self, method: str, path: str, **options: Any) -> Any:
        url = f"{self.origin}/api/sandboxes/box/ports{path}"
        async with self.http.request(method, url, **options) as response:
            data = await response.read()
            assert response.status < 300, data
            return json.loads(data) if data else None

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        port = self.server.state.previews.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(10):
                yield reader, writer
        finally:
            writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def received_headers(self) -> dict[str, str]:
        """The request headers that the app received."""
        return dict(self.json["headers"])


async def listen(sandbox: Sandbox, port: int = 3000) -> None:
    app = await sandbox.start_process(["python3", "-c", APP, str(port)])
    await app.wait_for_log("listening", 20)
