"""Sandboxes over the bridge protocol, who may ask, and what the server says of itself."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from starlette.routing import Route

from server.compat.bridge_client import Bridge
from smokebox.server.compat.bridge import app as protocol
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


async def test_a_sandbox_is_made_used_and_destroyed(bridge: Bridge) -> None:
    # As the Python client sends it, which is not JSON, and as the other one does.
    for body in (None, {"exposedPorts": [80], "timeoutMs": 1, "createTimeoutMs": 2}):
        async with bridge.http.post("/v1/sandbox", json=body) as answer:
            assert answer.status == 200
            bridge.id = (await answer.json())["id"]
        assert re.fullmatch("[a-z2-7]{26}", bridge.id)
        assert await bridge.running()
        await bridge.put("workspace/a", b"x")
        for _ in range(2):
            async with bridge.ask("DELETE", "") as gone:
                assert (gone.status, await gone.read()) == (204, b"")
        assert not await bridge.running()
        assert (await bridge.refused("GET", "/file/workspace/a"))[0] == 404


async def test_what_is_not_there_says_so(bridge: Bridge) -> None:
    assert (await bridge.refused("GET", "/nothing"))[:2] == (404, "not_found")
    assert (await bridge.refused("PATCH", "/exec"))[:2] == (405, "method_not_allowed")


async def test_a_tunnel_is_a_preview(bridge: Bridge, server: RunningServer) -> None:
    for body in ({"name": "site"}, None):
        async with bridge.ask("POST", "/tunnel/3000", json=body) as answer:
            assert answer.status == 200
            made = await answer.json()
        assert (made["port"], made["name"]) == (3000, "site")
        assert made["url"] == f"http://{made['hostname']}:{server.state.previews.port}/"
    [exposed] = await server.state.host.sandbox("box").ports.list()
    assert made["hostname"] == f"3000-box-{exposed.token}.localhost"
    for _ in range(2):
        async with bridge.ask("DELETE", "/tunnel/3000") as answer:
            assert answer.status == 204
    assert await server.state.host.sandbox("box").ports.list() == []
    for port in ("0", "x", "65536"):
        assert (await bridge.refused("POST", f"/tunnel/{port}"))[0] == 400
    assert (await bridge.refused("POST", "/tunnel/3000", json={"name": 3}))[0] == 400


async def test_running_makes_nothing_and_is_true_while_state_is_kept(
    bridge: Bridge, server: RunningServer
) -> None:
    assert not await bridge.running()
    assert await server.state.host.list() == []
    await bridge.out("true")
    assert await bridge.running()
    await server.state.host.sandbox("box").sleep()
    assert await bridge.running()
    info = await server.state.host.sandbox("box").info()
    assert info is not None
    assert info.status == "idle"


async def test_an_ephemeral_sandbox_that_sleeps_has_no_state(
    bridge: Bridge, server: RunningServer
) -> None:
    sandbox = await server.state.host.create("box", ephemeral=True)
    assert await bridge.running()
    await sandbox.sleep()
    assert not await bridge.running()


async def test_first_requests_at_once_make_one_sandbox(
    bridge: Bridge, server: RunningServer
) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(bridge.put(f"workspace/{number}", b""))
            group.create_task(bridge.out("touch", f"t{number}"))
    assert len((await bridge.out("ls")).split()) == 12
    assert [one.id for one in await server.state.host.list()] == ["box"]
    info = await server.state.host.sandbox("box").info()
    assert info is not None
    assert info.generation == 1


async def test_an_id_of_any_length_is_one_sandbox(bridge: Bridge) -> None:
    for id in ("a" * 128, "a" * 127 + "b", "admin"):
        bridge.id = id
        await bridge.put("workspace/id", id.encode())
    for id in ("a" * 128, "a" * 127 + "b", "admin"):
        bridge.id = id
        assert await bridge.get("workspace/id") == id.encode()


async def test_an_id_that_cannot_be_is_refused(bridge: Bridge) -> None:
    for id in ("foo;rm", "UPPER", "has-hyphen", "a1", "a" * 129, "%41", "ä"):
        bridge.id = id
        answer = await bridge.refused("GET", "/running")
        assert answer == (400, "invalid_request", "Invalid sandbox ID format")


@asynccontextmanager
async def keyed(tmp_path: Path, **key: Any) -> AsyncIterator[tuple[RunningServer, str]]:
    """A server that wants a key, and a key."""
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        made = await server.state.keys.create(CreateKey(name="test", **key))
        yield server, made.key


async def test_a_key_is_wanted_after_the_id_and_in_the_words_of_the_protocol(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, admin=True) as (server, key), _http(server) as http:
        bridge = Bridge(http, "box")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": key}):
            assert (await bridge.refused("GET", "/running", headers=headers))[:2] == (
                401,
                "unauthorized",
            )
        assert (await Bridge(http, "No").refused("GET", "/running"))[0] == 400
        for scheme in ("Bearer", "bearer", "BEARER"):
            async with bridge.ask(
                "GET", "/running", headers={"authorization": f"{scheme} {key}"}
            ) as answer:
                assert answer.status == 200
        async with http.get("/health") as healthy:
            assert (healthy.status, await healthy.json()) == (200, {"ok": True})


async def test_a_terminal_takes_a_key_by_its_query(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (server, key), _http(server) as http:
        path = "/v1/sandbox/box/pty"
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(path)
        assert caught.value.status == 401
        async with http.ws_connect(path, params={"authorization": f"Bearer {key}"}) as socket:
            assert await socket.receive_json(timeout=15) == {"type": "ready"}


async def test_a_description_takes_a_key_by_its_query(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (server, key), _http(server) as http:
        for path in ("/v1/openapi.json", "/v1/openapi.html", "/v1/openapi"):
            async with http.get(path) as answer:
                assert answer.status == 401
            async with http.get(path, params={"token": key}) as answer:
                assert answer.status == 200


async def test_sandboxes_of_a_key_with_a_prefix_are_below_it(tmp_path: Path) -> None:
    async with (
        keyed(tmp_path, prefix="team-a-") as (server, key),
        _http(server, authorization=f"Bearer {key}") as http,
    ):
        async with http.post("/v1/sandbox") as answer:
            id = (await answer.json())["id"]
        assert await Bridge(http, id).running()
        assert (await Bridge(http, id).run("true")).data == {"exit_code": 0}
        assert [one.id for one in await server.state.host.list()] == [f"team-a-{id}"]
        await server.state.host.create(id)
        await Bridge(http, id).put("workspace/a", b"")
        assert await server.state.host.sandbox(id).readdir("/workspace") == []
        async with http.get("/v1/pool/stats") as refused:
            assert (refused.status, (await refused.json())["code"]) == (403, "forbidden")


async def test_another_name_of_the_server_is_refused_in_the_words_of_the_protocol(
    bridge: Bridge,
) -> None:
    answer = await bridge.refused("GET", "/running", headers={"host": "evil.example"})
    assert answer[:2] == (403, "forbidden")


async def test_a_server_that_ends_says_so(bridge: Bridge, server: RunningServer) -> None:
    async with bridge.http.get("/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"ok": True})
    server.state.drain.begin(keep=False)
    async with bridge.http.get("/health") as answer:
        told = await answer.json()
        assert (answer.status, told["ok"], len(told["errors"])) == (503, False, 1)
    assert (await bridge.refused("GET", "/running"))[:2] == (503, "service_unavailable")


async def test_the_pool_is_primed_told_of_and_emptied(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=2)
    async with run_server(settings) as server, _http(server) as http:
        assert await _stats(http) == (0, 0, 0, 2)
        async with http.post("/v1/pool/prime") as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})
        assert await _stats(http) == (2, 0, 2, 2)
        await Bridge(http, "box").put("workspace/a", b"")
        async with asyncio.timeout(10):
            while await _stats(http) != (2, 1, 3, 2):
                await asyncio.sleep(0.02)
        async with http.post("/v1/pool/shutdown-prewarmed") as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})
        assert await _stats(http) == (0, 1, 1, 2)
        assert await Bridge(http, "box").get("workspace/a") == b""
        await Bridge(http, "other").put("workspace/a", b"")


async def test_the_description_has_every_route(bridge: Bridge) -> None:
    async with bridge.http.get("/v1/openapi.json") as answer:
        told = await answer.json()
    assert told["openapi"] == "3.1.0"
    described = {
        (path, method.upper()) for path, methods in told["paths"].items() for method in methods
    }
    served = {
        (route.path.replace(":path", ""), method)
        for route in protocol.routes()
        if isinstance(route, Route) and not route.path.endswith(("/openapi", "/openapi.html"))
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == served | {("/health", "GET")}
    pty = told["paths"]["/v1/sandbox/{id}/pty"]["get"]
    assert pty["operationId"] == "ptyTerminal"
    assert {"id", "cols", "rows", "shell", "session"} <= {one["name"] for one in pty["parameters"]}
    assert {"101", "400", "502"} <= set(pty["responses"])


async def test_the_description_is_a_page_too(bridge: Bridge) -> None:
    for path in ("/v1/openapi.html", "/v1/openapi"):
        async with bridge.http.get(path) as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert (await answer.text()).startswith("<!doctype html")


def _http(server: RunningServer, **headers: str) -> aiohttp.ClientSession:
    assert server.url is not None
    return aiohttp.ClientSession(server.url, headers=headers)


async def _stats(http: aiohttp.ClientSession) -> tuple[int, int, int, int]:
    async with http.get("/v1/pool/stats") as answer:
        told = await answer.json()
    assert told["maxInstances"] is None
    assert told["config"]["refreshInterval"] == 0
    return told["warm"], told["assigned"], told["total"], told["config"]["warmTarget"]
