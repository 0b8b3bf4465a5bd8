"""Ports by the SDK: exposed, seen, connected to, and within an app of one's own."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvicorn

from server import preview_app
from smokebox.client.client import connect
from smokebox.client.previews import proxy_to_sandbox
from smokebox.errors import Conflict, InvalidOption, ServiceUnavailable
from smokebox.server.serving import running
from smokebox.server.settings import Settings
from smokebox.sync import connect as connect_sync
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from client.served import Served
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


async def see(url: str, path: str = "", **headers: str) -> tuple[int, bytes]:
    """What a browser sees at a URL, whose name not every resolver knows."""
    host, _, rest = url.removeprefix("http://").partition("/")
    port = host.rpartition(":")[2]
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{port}/{rest}{path}", headers={"host": host, **headers}) as got,
    ):
        return got.status, await got.read()


async def test_a_port_is_seen_at_its_url_until_it_is_unexposed(sandbox: Sandbox) -> None:
    await listen(sandbox)
    url = await sandbox.get_preview_url(3000)
    exposed = await sandbox.expose_port(3000, name="site")
    assert (exposed.url, exposed.name, exposed.status) == (url, "site", "active")
    assert await sandbox.get_exposed_ports() == [exposed]
    assert (await see(url, "x"))[0] == 200
    assert await sandbox.validate_port_token(3000, exposed.token)
    assert not await sandbox.validate_port_token(3000, "other")
    soon = await sandbox.get_preview_url(3000, expires_in=60)
    assert soon != url
    assert (await see(soon))[0] == 200
    await sandbox.unexpose_port(3000)
    await sandbox.unexpose_port(3000)
    assert (await see(url))[0] == (await see(soon))[0] == 404
    assert await sandbox.get_exposed_ports() == []


async def test_bad_ports_names_and_tokens_are_the_engines_errors(sandbox: Sandbox) -> None:
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
    with pytest.raises(Conflict, match="exposed by another name"):
        await sandbox.expose_port(3000, name="b")


async def test_a_websocket_reaches_a_port_that_nobody_exposed(sandbox: Sandbox) -> None:
    await listen(sandbox)
    async with await sandbox.ws_connect(3000, "/ws") as socket:
        for message in ("text", b"bytes"):
            await socket.send(message)
            assert await socket.recv() == message
    with pytest.raises(ServiceUnavailable, match="closed"):
        await socket.recv()
    assert [message async for message in socket] == []
    assert await sandbox.get_exposed_ports() == []


async def test_a_websocket_that_cannot_be_is_told_why(sandbox: Sandbox) -> None:
    with pytest.raises(ServiceUnavailable, match="nothing listens on port 3000"):
        await sandbox.ws_connect(3000)
    await listen(sandbox)
    with pytest.raises(ServiceUnavailable, match="does not take a WebSocket at /other"):
        await sandbox.ws_connect(3000, "/other")
    with pytest.raises(InvalidOption, match="begins with a slash"):
        await sandbox.ws_connect(3000, "ws")
    with pytest.raises(InvalidOption, match="from 1 to 65535"):
        await sandbox.ws_connect(70000)


def test_ports_without_await(server: Served) -> None:
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
    """An ASGI app of a user's, served by uvicorn; its address."""
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


async def use(address: str, host: str) -> None:
    """See a preview through an app that has it among its own pages."""
    name = {"host": host}
    async with aiohttp.ClientSession(auto_decompress=False) as http:
        async with http.get(f"http://{address}/") as answer:
            assert await answer.read() == b"the site itself"
        told = {**name, "authorization": "Bearer of-the-app", "x-forwarded-for": "6.6.6.6"}
        async with http.get(f"http://{address}/a%20b?c=1", headers=told) as answer:
            shown = await answer.json()
        got = dict(shown["headers"])
        assert shown["path"] == "/a%20b?c=1"
        assert (got["host"], got["x-forwarded-host"]) == (host, host)
        assert (got["x-forwarded-for"], got["authorization"]) == ("127.0.0.1", "Bearer of-the-app")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield bytes(100_000)

        async with http.post(f"http://{address}/", headers=name, data=pieces()) as answer:
            assert (await answer.json())["size"] == 2_000_000
        async with http.get(f"http://{address}/big?5000000", headers=name) as answer:
            assert len(await answer.read()) == 5_000_000
        async with http.get(
            f"http://{address}/redirect?/x", headers=name, allow_redirects=False
        ) as answer:
            assert (answer.status, answer.headers["location"]) == (302, "/x")
        async with http.ws_connect(f"http://{address}/ws", headers=name) as socket:
            await socket.send_str("hello")
            assert (await socket.receive()).data == "hello"
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(f"http://{address}/other", headers=name)


async def test_who_reads_late_is_answered_again_over_the_same_connection(
    sandbox: Sandbox, server: Served
) -> None:
    await listen(sandbox)
    token = (await sandbox.expose_port(3000)).token
    host = f"3000-{sandbox.id}-{token}.localhost"
    reader, writer = await asyncio.open_unix_connection(server.url.removeprefix("unix:"))
    # Somewhere among these, the last piece is the one that is too much.
    for size in range(250_000, 1_000_000, 20_000):
        writer.write(f"GET /big?{size} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        await asyncio.sleep(0.02)
        await reader.readuntil(b"\r\n\r\n")
        assert len(await reader.readexactly(size)) == size
    writer.close()
    await writer.wait_closed()


async def test_previews_within_an_app_of_ones_own(sandbox: Sandbox, client: Client) -> None:
    await listen(sandbox)
    [process] = await sandbox.list_processes()
    exposed = await sandbox.expose_port(3000)
    async with serving(user_app(client)) as address:
        host = f"3000-{sandbox.id}-{exposed.token}.my.example"
        await use(address, host)
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://{address}/events", headers={"host": host}) as answer,
        ):
            assert await answer.content.readline() == b"data: 0\n"
        await process.wait_for_log("the reader left", timeout=20)
        async with aiohttp.ClientSession() as http:
            wrong = {"host": f"3000-{sandbox.id}-wrong.my.example"}
            async with http.get(f"http://{address}/", headers=wrong) as answer:
                assert answer.status == 404


async def test_an_app_may_ask_a_server_that_wants_keys(tmp_path: Path) -> None:
    settings = Settings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0, keys=True)
    async with running(settings) as server:
        key = (await server.state.keys.create(CreateKey(name="app"))).key
        assert server.url is not None
        async with connect(server.url, api_key=key) as client, await client.create() as sandbox:
            await listen(sandbox)
            exposed = await sandbox.expose_port(3000)
            async with serving(user_app(client)) as address:
                host = f"3000-{sandbox.id}-{exposed.token}.my.example"
                await use(address, host)
                # The key says who the app is, not who its visitors are.
                await sandbox.expose_port(3000, private=True)
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(f"http://{address}/", headers={"host": host}) as answer,
                ):
                    assert answer.status == 401


@pytest.mark.parametrize(
    "host", ["", "localhost", "my.example", "x.my.example", "3000-box-tok", "0-box-tok.my.example"]
)
def test_what_names_no_preview_is_left_to_the_app(client: Client, host: str) -> None:
    scope = {"type": "http", "headers": [(b"host", host.encode())]}
    assert proxy_to_sandbox(scope, client) is None
    assert proxy_to_sandbox({"type": "lifespan"}, client) is None


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_a_target_that_would_lead_elsewhere_is_refused(client: Client, kind: str) -> None:
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


def test_the_names_of_this_capability_are_public() -> None:
    import smokebox
    from smokebox import egress

    assert smokebox.proxy_to_sandbox is proxy_to_sandbox
    for name in ("basic", "bearer", "chain", "header", "log", "record", "replay", "sign_s3"):
        assert callable(getattr(egress, name))
