"""Fixtures: a server on the event loop of the test, with real sockets, and an aiohttp client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest_asyncio

from server.preview_site import Site, listen
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server without keys, on its unix socket and on the loopback address."""
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0)
    async with run_server(settings) as server:
        yield server


@pytest_asyncio.fixture
async def http(server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of its unix socket: `http.get("/api/...")`."""
    connector = aiohttp.UnixConnector(server.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        yield session


@pytest_asyncio.fixture
async def server_url(server: RunningServer) -> str:
    """Its URL on the loopback interface."""
    assert server.url is not None
    return server.url


@pytest_asyncio.fixture
async def site(server: RunningServer) -> AsyncIterator[Site]:
    """An app in a sandbox, on an exposed port."""
    sandbox = server.state.host.sandbox("box")
    await listen(sandbox)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(cookie_jar=jar, auto_decompress=False) as http:
        site = Site(server=server, sandbox=sandbox, http=http, url="")
        exposed = await site.api("POST", "", json={"port": 3000, "token": "tok"})
        yield Site(server=server, sandbox=sandbox, http=http, url=exposed["url"])
