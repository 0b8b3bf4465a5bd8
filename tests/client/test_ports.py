"""Ports by the SDK: exposed, connected to, and served by a user's app."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvicorn
from yarl import URL

from server import preview_app
from smokebox.client.client import connect
from smokebox.client.previews import proxy_to_sandbox
from smokebox.errors import Conflict, InvalidOption, ServiceUnavailable
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.sync import connect as connect_sync
from smokebox.wire.preview import TOKEN_HEADER
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from client.server_process import ServerProcess
    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox

APP = Path(preview_app.__file__).read_text()


@pytest.fixture
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with client, await client.create() as sandbox:
        yield sandbox


async def listen(sandbox: Sandbox, port: int = 3000) -> None:
    app = await sandbox.start_process(["python3", "-c", APP, str(port)])
    await app.wait_for_log("listening", timeout=20)


async def get(url: str, path: str = "", **headers: str) -> tuple[int, bytes]:
    """Send a GET request without resolving the host name; return status and body."""
    parts = URL(url)
    async with (
        aiohttp.ClientSession() as http,
        http.get(
            parts.with_host("127.0.0.1").with_path(f"/{path}", keep_query=True),
            headers={"host": parts.authority, **headers},
        ) as response,
    ):
        return response.status, await response.read()


async def test_port_is_served_at_its_url_until_unexposed(sandbox: Sandbox) -> None:
    await listen(sandbox)
    url = await sandbox.get_preview_url(3000)
    exposed = await sandbox.expose_port(3000, name="site")
    assert (exposed.url, exposed.name, exposed.status) == (url, "site", "active")
    assert await sandbox.get_exposed_ports() == [exposed]
    assert (await get(url, "x"))[0] == 200
    assert await sandbox.validate_port_token(3000, exposed.token)
    assert not await sandbox.validate_port_token(3000, "other")
    soon = await sandbox.get_preview_url(3000, expires_in=60)
    assert soon != url
    assert (await get(soon))[0] == 200
    await sandbox.unexpose_port(3000)
    await sandbox.unexpose_port(3000)
    assert (await get(url))[0] == (await get(soon))[0] == 404
    assert await sandbox.get_exposed_ports() == []


async def test_invalid_ports_names_and_tokens_raise_the_engine_errors(sandbox: Sandbox) -> None:
    for options in (
        {"port": 0},
        {"port": 65536},
        {"port": 3000, "token": "A"},
        {"port": 3000, "name": ""},
    ):
        with pytest.raises(InvalidOption):
            await sandbox.expose_port(**options)
    for expires_in in (-1, float("nan"), float("inf")):
        with pytest.raises(InvalidOption):
            await sandbox.get_preview_url(3000, expires_in=expires_in)
    await sandbox.expose_port(3000, name="a")
    with pytest.raises(Conflict, match="exposed with another name"):
        await sandbox.expose_port(3000, name="b")


async def test_websocket_reaches_an_unexposed_port(sandbox: Sandbox) -> None:
    await listen(sandbox)
    async with await sandbox.ws_connect(3000, "/ws") as socket:
        for message in ("text", b"bytes"):
            await socket.send(message)
            assert await socket.recv() == message
    with pytest.raises(ServiceUnavailable, match="closed"):
        await socket.recv()
    assert [message async for message in socket] == []
    assert await sandbox.get_exposed_ports() == []


async def test_refused_websocket_says_why(sandbox: Sandbox) -> None:
    with pytest.raises(ServiceUnavailable, match="nothing listens on port 3000"):
        await sandbox.ws_connect(3000)
    await listen(sandbox)
    with pytest.raises(ServiceUnavailable, match="does not accept a WebSocket at /other"):
        await sandbox.ws_connect(3000, "/other")
    with pytest.raises(InvalidOption, match="begins with a slash"):
        await sandbox.ws_connect(3000, "ws")
    with pytest.raises(InvalidOption, match="from 1 to 65535"):
        await sandbox.ws_connect(70000)


def test_ports_without_await(server: ServerProcess) -> None:
    with connect_sync(server.url).create() as sandbox:
        app = sandbox.start_process(["python3", "-c", APP, "3000"])
        app.wait_for_log("listening", timeout=20)
        with sandbox.ws_connect(3000, "/ws") as socket:
            socket.send("hello")
            assert socket.recv() == "hello"
        url = sandbox.get_preview_url(3000)
        assert [one.url for one in sandbox.get_exposed_ports()] == [url]


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve a user's ASGI app with uvicorn, and yield its address."""
    config = uvicorn.Config(
        app, port=0, log_config=None, lifespan="off", ws="websockets-sansio", proxy_headers=False
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def user_app(client: Client) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        preview = proxy_to_sandbox(scope, client)
        if preview is not None:
            await preview(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the site itself"})

    return app


async def use(address: str, host: str, token: str) -> None:
    """Request a preview through an app that also has its own pages."""
    name = {"host": host, TOKEN_HEADER: token}
    async with aiohttp.ClientSession(auto_decompress=False) as http:
        async with http.get(f"http://{address}/") as response:
            assert await response.read() == b"the site itself"
        headers = {**name, "authorization": "Bearer of-the-app", "x-forwarded-for": "6.6.6.6"}
        async with http.get(f"http://{address}/a%20b?c=1", headers=headers) as response:
            echo = await response.json()
        received = dict(echo["headers"])
        assert echo["path"] == "/a%20b?c=1"
        assert (received["host"], received["x-forwarded-host"]) == (host, host)
        assert (received["x-forwarded-for"], received["authorization"]) == (
            "127.0.0.1",
            "Bearer of-the-app",
        )

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield bytes(100_000)

        async with http.post(f"http://{address}/", headers=name, data=pieces()) as response:
            assert (await response.json())["size"] == 2_000_000
        async with http.get(f"http://{address}/big?5000000", headers=name) as response:
            assert len(await response.read()) == 5_000_000
        async with http.get(
            f"http://{address}/redirect?/x", headers=name, allow_redirects=False
        ) as response:
            assert (response.status, response.headers["location"]) == (302, "/x")
        async with http.ws_connect(f"http://{address}/ws", headers=name) as socket:
            await socket.send_str("hello")
            assert (await socket.receive()).data == "hello"
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(f"http://{address}/other", headers=name)


async def test_late_reader_reuses_the_connection(sandbox: Sandbox, server: ServerProcess) -> None:
    await listen(sandbox)
    exposed = await sandbox.expose_port(3000)
    head = f"host: {exposed.label}.localhost\r\n{TOKEN_HEADER}: {exposed.token}\r\n"
    reader, writer = await asyncio.open_unix_connection(server.url.removeprefix("unix:"))
    # One of these sizes exceeds the buffer with its last chunk.
    for size in range(250_000, 1_000_000, 20_000):
        writer.write(f"GET /big?{size} HTTP/1.1\r\n{head}\r\n".encode())
        await asyncio.sleep(0.02)
        await reader.readuntil(b"\r\n\r\n")
        assert len(await reader.readexactly(size)) == size
    writer.close()
    await writer.wait_closed()


async def test_previews_are_served_by_a_users_app(sandbox: Sandbox, client: Client) -> None:
    await listen(sandbox)
    [process] = await sandbox.list_processes()
    exposed = await sandbox.expose_port(3000)
    async with serving(user_app(client)) as address:
        host = f"{exposed.label}.my.example"
        await use(address, host, exposed.token)
        shown = {"host": host, TOKEN_HEADER: exposed.token}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://{address}/events", headers=shown) as response,
        ):
            assert await response.content.readline() == b"data: 0\n"
        await process.wait_for_log("the client left", timeout=20)
        async with aiohttp.ClientSession() as http:
            wrong = {"host": f"3000-{sandbox.id}-wrong.my.example"}
            async with http.get(f"http://{address}/", headers=wrong) as response:
                assert response.status == 404


async def test_users_app_reaches_a_server_with_keys(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0, keys=True)
    async with run_server(settings) as server:
        key = (await server.state.keys.create(CreateKey(name="app"))).key
        assert server.url is not None
        async with connect(server.url, api_key=key) as client, await client.create() as sandbox:
            await listen(sandbox)
            exposed = await sandbox.expose_port(3000)
            async with serving(user_app(client)) as address:
                host = f"{exposed.label}.my.example"
                await use(address, host, exposed.token)
                # The key authenticates the app, not its visitors.
                await sandbox.expose_port(3000, private=True)
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(
                        f"http://{address}/", headers={"host": host, TOKEN_HEADER: exposed.token}
                    ) as response,
                ):
                    assert response.status == 401


@pytest.mark.parametrize(
    "host", ["", "localhost", "my.example", "x.my.example", "3000-box-tok", "0-box-tok.my.example"]
)
def test_other_host_names_are_left_to_the_app(client: Client, host: str) -> None:
    scope = {"type": "http", "headers": [(b"host", host.encode())]}
    assert proxy_to_sandbox(scope, client) is None
    assert proxy_to_sandbox({"type": "lifespan"}, client) is None


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_request_target_with_another_host_is_refused(client: Client, kind: str) -> None:
    scope = {
        "type": kind,
        "method": "GET",
        "path": "@127.0.0.1:1/",
        "raw_path": b"@127.0.0.1:1/",
        "headers": [(b"host", b"3000-box-tok.my.example")],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": f"{kind}.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    preview = proxy_to_sandbox(scope, client)
    assert preview is not None
    await preview(scope, receive, send)
    assert sent[0].get("status", sent[0].get("code")) == (400 if kind == "http" else 1008)


def test_proxy_to_sandbox_is_public() -> None:
    import smokebox
    from smokebox import egress

    assert smokebox.proxy_to_sandbox is proxy_to_sandbox
    for name in ("basic", "bearer", "chain", "header", "log", "record", "replay", "sign_s3"):
        assert callable(getattr(egress, name))
