"""What the tests of the bridge protocol have: a sandbox that is asked by plain HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest_asyncio

from server.compat.bridge_client import Bridge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.server.server import RunningServer


@pytest_asyncio.fixture
async def bridge(server: RunningServer) -> AsyncIterator[Bridge]:
    """A sandbox that nobody has used yet, asked for by TCP."""
    assert server.url is not None
    async with aiohttp.ClientSession(server.url) as http:
        yield Bridge(http, "box")
