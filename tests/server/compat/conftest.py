"""Fixtures of the tests of the bridge protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest_asyncio

from server.compat.bridge_client import BridgeClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.server.server import RunningServer


@pytest_asyncio.fixture
async def bridge(server: RunningServer) -> AsyncIterator[BridgeClient]:
    """A client over TCP of a sandbox that does not exist yet."""
    assert server.url is not None
    async with aiohttp.ClientSession(server.url) as http:
        yield BridgeClient(http, "box")
