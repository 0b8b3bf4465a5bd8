"""Deadlines of request heads, and limits of connections by address."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from smokebox.errors import InvalidOption
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.connections import ConnectionLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.server.server import RunningServer

HEAD = b"GET /api/health HTTP/1.1\r\nhost: localhost\r\n"
PREVIEW = b"GET / HTTP/1.1\r\nhost: 1-a-b.localhost\r\n"


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, **options: Any) -> AsyncIterator[RunningServer]:
    home = str(tmp_path / "home")
    settings = {"home": home, "host": "127.0.0.1", "pool": 0, **options}
    async with run_server(ServerSettings(**settings)) as server, asyncio.timeout(15):
        yield server


@contextlib.asynccontextmanager
async def connection(
    server: RunningServer,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.state.previews.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def drip(server: RunningServer, start: bytes, more: bytes) -> bytes:
    """Send the start of a request, and then `more` again and again; return the response."""
    response = b""
    async with connection(server) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(start)
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0.01)
            response = await reading
    return response


async def status(session: aiohttp.ClientSession, path: str = "/api/health", **options: Any) -> int:
    async with session.get(path, **options) as response:
        return response.status


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"", b""),
        (b"G", b""),
        (HEAD, b""),
        (HEAD, b"x: y\r\n"),
        (HEAD + b"x: ", b"y"),
        (PREVIEW, b""),
        (PREVIEW, b"x: y\r\n"),
        # After a response: the head of the next request, or the rest of a refused body.
        (HEAD + b"\r\nGET ", b"/"),
        (b"POST /api/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n", b"x"),
    ],
)
async def test_slow_request_is_closed_before_and_after_authentication(
    tmp_path: Path, start: bytes, more: bytes, keys: bool
) -> None:
    async with serving(tmp_path, head_timeout=0.3, keys=keys) as server:
        await asyncio.gather(*(drip(server, start, more) for _ in range(20)))
        async with aiohttp.ClientSession(server.url) as session:
            assert await status(session) == 200


async def test_slow_head_is_closed_where_only_previews_are_served(tmp_path: Path) -> None:
    async with serving(tmp_path, head_timeout=0.3, host=None) as server:
        await server.state.previews.listen()
        assert await drip(server, PREVIEW, b"x: y\r\n") == b""


@pytest.mark.parametrize("start", [HEAD + b"x: ", PREVIEW + b"x: "])
async def test_endless_head_is_refused(tmp_path: Path, start: bytes) -> None:
    async with serving(tmp_path) as server:
        response = await drip(server, start, b"y" * 65536)
        assert response == b"" or b" 431 " in response


async def test_endless_trailers_are_refused(tmp_path: Path) -> None:
    chunked = b"POST /api/keys HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(tmp_path) as server:
        for start in (b"0\r\nx: ", b"1;"):
            response = await drip(server, chunked + start, b"y" * 65536)
            assert response == b"" or response.split()[1] in (b"400", b"431")


async def test_slow_handler_has_no_deadline(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, head_timeout=0.2) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        await (await session.put("/api/sandboxes/box", json={})).read()
        command = {"command": "sleep 0.6; echo done"}
        async with session.post("/api/sandboxes/box/exec", json=command) as response:
            assert (await response.json())["stdout"] == "done\n"


async def test_address_above_its_connections_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, address_connections=3) as server:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(connection(server))
            async with connection(server) as (reader, _):
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            error = json.loads(body)["error"]
            assert (head.split()[1], error["code"]) == (b"429", "limit_reached")
            assert "--address-connections" in error["hint"]
            by_socket = aiohttp.UnixConnector(server.socket)
            async with aiohttp.ClientSession("http://localhost", connector=by_socket) as local:
                assert await status(local) == 200
        await until_accepted(server)


async def test_websockets_and_previews_count_until_they_are_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, address_connections=1) as server:
        async with aiohttp.ClientSession(server.url) as session:
            await (await session.put("/api/sandboxes/box", json={})).read()
        terminal = "/api/sandboxes/box/terminal"
        for host, path in (("localhost", terminal), ("1-a-b.localhost", "/")):
            await until_accepted(server)
            async with connection(server) as (reader, writer):
                head = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\n"
                key = "sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
                writer.write(f"{head}upgrade: websocket\r\n{key}\r\n".encode())
                await reader.readuntil(b"\r\n\r\n")
                async with connection(server) as (other, _):
                    assert b" 429 " in await other.read()
        await until_accepted(server)


async def until_accepted(server: RunningServer) -> None:
    """Wait until the server has noticed that earlier connections are closed."""
    answer = b"429"
    while b"429" in answer:
        async with connection(server) as (reader, writer):
            writer.write(HEAD + b"connection: close\r\n\r\n")
            answer = await reader.read(12)
    assert answer.endswith(b"200")


async def test_server_above_its_connections_refuses_more(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, max_connections=2) as server,
        connection(server),
        connection(server),
        connection(server) as (reader, _),
    ):
        assert b"this server already has 2 open connections" in await reader.read()


async def test_trusted_proxy_tells_the_addresses_of_its_clients(tmp_path: Path) -> None:
    options = {"address_connections": 2, "trusted_proxies": ("127.0.0.0/8",)}
    async with (
        serving(tmp_path, **options) as server,
        aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        await (await session.put("/api/sandboxes/box", json={})).read()
        path, streams = "/api/sandboxes/box/egress/log/stream", []
        for forged in ("6.6.6.6, 10.1.1.1", "10.1.1.1, 127.0.0.9"):
            streams.append(await session.get(path, headers={"x-forwarded-for": forged}))
            assert streams[-1].status == 200
        for client, expected in (("10.1.1.1", 429), ("10.1.1.1:99", 429), ("10.1.1.2", 200)):
            headers = {"x-forwarded-for": client}
            assert await status(session, "/api/sandboxes", headers=headers) == expected
            preview = {**headers, "host": "1-a-b.localhost"}
            refused = 429 if expected == 429 else 404
            assert await status(session, "/", headers=preview) == refused


async def test_other_peers_cannot_choose_their_address(tmp_path: Path) -> None:
    options = {"address_connections": 2, "trusted_proxies": ("10.0.0.1",)}
    async with serving(tmp_path, **options) as server, contextlib.AsyncExitStack() as stack:
        for number in range(2):
            reader, writer = await stack.enter_async_context(connection(server))
            writer.write(HEAD + b"x-forwarded-for: 10.1.1.%d\r\n\r\n" % number)
            assert (await reader.read(12)).endswith(b" 200")
        async with connection(server) as (reader, _):
            assert b" 429 " in await reader.read()


@pytest.mark.parametrize("proxy", ["", "proxy.example", "10.0.0.0/40"])
def test_invalid_proxy_is_refused(proxy: str) -> None:
    with pytest.raises(InvalidOption, match="not the address of a proxy"):
        ConnectionLimits(trusted_proxies=[proxy])
