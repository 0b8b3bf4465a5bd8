"""A server on the loopback for sandboxes to ask, which tells what it was asked."""

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
    """`place` is where it listens; `asked` are the heads of what came."""

    place: str = ""
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    received: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """`/big/N` is so many bytes; all else is echoed."""
        self.asked.append((request.method, request.path_qs, _lower(request)))
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
    """Such a server, for as long as the block lasts."""
    server = Upstream()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.place = f"{host}:{port}"
        yield server
    finally:
        await runner.cleanup()
