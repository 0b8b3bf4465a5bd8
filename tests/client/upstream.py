"""HTTP server on the loopback that sandboxes send requests to, and that records them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = "api.test"


@dataclass
class Upstream:
    """`address` is its host and port; `requests` has methods, paths and headers."""

    address: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    received: int = 0

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Send N bytes for `/big/N`, and otherwise an echo of the request."""
        self.requests.append((request.method, request.path_qs, _lower(request)))
        if request.path.startswith("/big/"):
            return web.Response(body=b"y" * int(request.path.rpartition("/")[2]))
        size = 0
        async for piece in request.content.iter_any():
            size += len(piece)
        self.received += size
        token = request.headers.get("authorization", "no token")
        return web.Response(text=f"{request.method} {request.path} {size} {token}")


def _lower(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    """Run the server within the block."""
    server = Upstream()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", server.respond)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.address = f"{host}:{port}"
        yield server
    finally:
        await runner.cleanup()
