"""HTTP clients with API keys of their own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import aiohttp

from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.server.server import RunningServer


@contextlib.asynccontextmanager
async def client(
    server: RunningServer, prefix: str = "", *, admin: bool = False, profile: str | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client with a new key, whose id is in the header `x-key-id`."""
    body = CreateKey(name="k", prefix=prefix, admin=admin, profile=profile, overlap=True)
    key = await server.state.keys.create(body)
    headers = {"authorization": f"Bearer {key.key}", "x-key-id": key.id}
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        yield session
