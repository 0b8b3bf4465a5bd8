"""Sandboxes over the bridge protocol: lifecycle, authentication, pool and OpenAPI document."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from starlette.routing import Route

from server.compat.bridge_client import BridgeClient
from smokebox.server.compat.bridge import app as protocol
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


async def test_sandbox_is_created_used_and_destroyed(bridge: BridgeClient) -> None:
    # The Python client sends no JSON, the JavaScript client does.
    for body in (None, {"exposedPorts": [80], "timeoutMs": 1, "createTimeoutMs": 2}):
        async with bridge.http.post("/v1/sandbox", json=body) as response:
            assert response.status == 200
            bridge.id = (await response.json())["id"]
        assert re.fullmatch("[a-z2-7]{26}", bridge.id)
        assert await bridge.running()
        await bridge.put("workspace/a", b"x")
        for _ in range(2):
            async with bridge.request("DELETE", "") as gone:
                assert (gone.status, await gone.read()) == (204, b"")
        assert not await bridge.running()
        assert (await bridge.request_error("GET", "/file/workspace/a"))[0] == 404


async def test_unknown_paths_and_methods(bridge: BridgeClient) -> None:
    assert (await bridge.request_error("GET", "/nothing"))[:2] == (404, "not_found")
    assert (await bridge.request_error("PATCH", "/exec"))[:2] == (405, "method_not_allowed")


async def test_tunnel_is_a_preview_url(bridge: BridgeClient, server: RunningServer) -> None:
    for body in ({"name": "site"}, None):
        async with bridge.request("POST", "/tunnel/3000", json=body) as response:
            assert response.status == 200
            tunnel = await response.json()
        assert (tunnel["port"], tunnel["name"]) == (3000, "site")
    [exposed] = await server.state.host.sandbox("box").ports.list()
    assert tunnel["hostname"] == f"3000-box-{exposed.slug}.localhost"
    origin = f"http://{tunnel['hostname']}:{server.state.previews.port}"
    assert tunnel["url"] == f"{origin}/?token={exposed.token}"
    assert exposed.token not in tunnel["id"]
    for _ in range(2):
        async with bridge.request("DELETE", "/tunnel/3000") as response:
            assert response.status == 204
    assert await server.state.host.sandbox("box").ports.list() == []
    for port in ("0", "x", "65536"):
        assert (await bridge.request_error("POST", f"/tunnel/{port}"))[0] == 400
    assert (await bridge.request_error("POST", "/tunnel/3000", json={"name": 3}))[0] == 400


async def test_running_is_true_while_files_exist_and_creates_nothing(
    bridge: BridgeClient, server: RunningServer
) -> None:
    assert not await bridge.running()
    assert await server.state.host.list() == []
    await bridge.output("true")
    assert await bridge.running()
    await server.state.host.sandbox("box").sleep()
    assert await bridge.running()
    info = await server.state.host.sandbox("box").info()
    assert info is not None
    assert info.status == "idle"


async def test_sleeping_ephemeral_sandbox_is_not_running(
    bridge: BridgeClient, server: RunningServer
) -> None:
    sandbox = await server.state.host.create("box", ephemeral=True)
    assert await bridge.running()
    await sandbox.sleep()
    assert not await bridge.running()


async def test_concurrent_first_requests_create_one_sandbox(
    bridge: BridgeClient, server: RunningServer
) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(bridge.put(f"workspace/{number}", b""))
            group.create_task(bridge.output("touch", f"t{number}"))
    assert len((await bridge.output("ls")).split()) == 12
    assert [sandbox.id for sandbox in await server.state.host.list()] == ["box"]
    info = await server.state.host.sandbox("box").info()
    assert info is not None
    assert info.generation == 1


async def test_long_and_reserved_ids_are_distinct_sandboxes(bridge: BridgeClient) -> None:
    for id in ("a" * 128, "a" * 127 + "b", "admin"):
        bridge.id = id
        await bridge.put("workspace/id", id.encode())
    for id in ("a" * 128, "a" * 127 + "b", "admin"):
        bridge.id = id
        assert await bridge.get("workspace/id") == id.encode()


async def test_invalid_ids_are_refused(bridge: BridgeClient) -> None:
    for id in ("foo;rm", "UPPER", "has-hyphen", "a1", "a" * 129, "%41", "ä"):
        bridge.id = id
        response = await bridge.request_error("GET", "/running")
        assert response == (400, "invalid_request", "Invalid sandbox ID format")


@asynccontextmanager
async def run_keyed_server(tmp_path: Path, **key: Any) -> AsyncIterator[tuple[RunningServer, str]]:
    """Run a server that requires keys, and yield it with a key."""
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        created = await server.state.keys.create(CreateKey(name="test", **key))
        yield server, created.key


async def test_id_is_checked_before_the_key(
    tmp_path: Path,
) -> None:
    async with run_keyed_server(tmp_path, admin=True) as (server, key), _http(server) as http:
        bridge = BridgeClient(http, "box")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": key}):
            assert (await bridge.request_error("GET", "/running", headers=headers))[:2] == (
                401,
                "unauthorized",
            )
        assert (await BridgeClient(http, "No").request_error("GET", "/running"))[0] == 400
        for scheme in ("Bearer", "bearer", "BEARER"):
            async with bridge.request(
                "GET", "/running", headers={"authorization": f"{scheme} {key}"}
            ) as response:
                assert response.status == 200
        async with http.get("/health") as healthy:
            assert (healthy.status, await healthy.json()) == (200, {"ok": True})


async def test_terminal_accepts_a_key_in_the_query(tmp_path: Path) -> None:
    async with run_keyed_server(tmp_path) as (server, key), _http(server) as http:
        path = "/v1/sandbox/box/pty"
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(path)
        assert caught.value.status == 401
        async with http.ws_connect(path, params={"authorization": f"Bearer {key}"}) as socket:
            assert await socket.receive_json(timeout=15) == {"type": "ready"}


async def test_openapi_document_accepts_a_key_in_the_query(tmp_path: Path) -> None:
    async with run_keyed_server(tmp_path) as (server, key), _http(server) as http:
        for path in ("/v1/openapi.json", "/v1/openapi.html", "/v1/openapi"):
            async with http.get(path) as response:
                assert response.status == 401
            async with http.get(path, params={"token": key}) as response:
                assert response.status == 200


async def test_ids_of_a_key_with_a_prefix_get_the_prefix(tmp_path: Path) -> None:
    async with (
        run_keyed_server(tmp_path, prefix="team-a-") as (server, key),
        _http(server, authorization=f"Bearer {key}") as http,
    ):
        async with http.post("/v1/sandbox") as response:
            id = (await response.json())["id"]
        assert await BridgeClient(http, id).running()
        assert (await BridgeClient(http, id).run("true")).data == {"exit_code": 0}
        assert [sandbox.id for sandbox in await server.state.host.list()] == [f"team-a-{id}"]
        await server.state.host.create(id)
        await BridgeClient(http, id).put("workspace/a", b"")
        assert await server.state.host.sandbox(id).readdir("/workspace") == []
        async with http.get("/v1/pool/stats") as refused:
            assert (refused.status, (await refused.json())["code"]) == (403, "forbidden")


async def test_foreign_host_name_gets_an_error_of_the_protocol(
    bridge: BridgeClient,
) -> None:
    response = await bridge.request_error("GET", "/running", headers={"host": "evil.example"})
    assert response[:2] == (403, "forbidden")


async def test_draining_server_is_unavailable(bridge: BridgeClient, server: RunningServer) -> None:
    async with bridge.http.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"ok": True})
    server.state.drain.begin(keep=False)
    async with bridge.http.get("/health") as response:
        body = await response.json()
        assert (response.status, body["ok"], len(body["errors"])) == (503, False, 1)
    assert (await bridge.request_error("GET", "/running"))[:2] == (503, "service_unavailable")


async def test_pool_is_primed_and_emptied(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=2)
    async with run_server(settings) as server, _http(server) as http:
        assert await _stats(http) == (0, 0, 0, 2)
        async with http.post("/v1/pool/prime") as response:
            assert (response.status, await response.json()) == (200, {"ok": True})
        assert await _stats(http) == (2, 0, 2, 2)
        await BridgeClient(http, "box").put("workspace/a", b"")
        async with asyncio.timeout(10):
            while await _stats(http) != (2, 1, 3, 2):
                await asyncio.sleep(0.02)
        async with http.post("/v1/pool/shutdown-prewarmed") as response:
            assert (response.status, await response.json()) == (200, {"ok": True})
        assert await _stats(http) == (0, 1, 1, 2)
        assert await BridgeClient(http, "box").get("workspace/a") == b""
        await BridgeClient(http, "other").put("workspace/a", b"")


async def test_openapi_document_has_every_route(bridge: BridgeClient) -> None:
    async with bridge.http.get("/v1/openapi.json") as response:
        document = await response.json()
    assert document["openapi"] == "3.1.0"
    documented = {
        (path, method.upper()) for path, methods in document["paths"].items() for method in methods
    }
    served = {
        (route.path.replace(":path", ""), method)
        for route in protocol.routes()
        if isinstance(route, Route) and not route.path.endswith(("/openapi", "/openapi.html"))
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert documented == served | {("/health", "GET")}
    pty = document["paths"]["/v1/sandbox/{id}/pty"]["get"]
    assert pty["operationId"] == "ptyTerminal"
    assert {"id", "cols", "rows", "shell", "session"} <= {
        parameter["name"] for parameter in pty["parameters"]
    }
    assert {"101", "400", "502"} <= set(pty["responses"])


async def test_openapi_document_as_a_web_page(bridge: BridgeClient) -> None:
    for path in ("/v1/openapi.html", "/v1/openapi"):
        async with bridge.http.get(path) as response:
            assert (response.status, response.content_type) == (200, "text/html")
            assert (await response.text()).startswith("<!doctype html")


def _http(server: RunningServer, **headers: str) -> aiohttp.ClientSession:
    assert server.url is not None
    return aiohttp.ClientSession(server.url, headers=headers)


async def _stats(http: aiohttp.ClientSession) -> tuple[int, int, int, int]:
    async with http.get("/v1/pool/stats") as response:
        stats = await response.json()
    assert stats["maxInstances"] is None
    assert stats["config"]["refreshInterval"] == 0
    return stats["warm"], stats["assigned"], stats["total"], stats["config"]["warmTarget"]


async def test_a_sandbox_of_a_built_image_is_used_by_its_id(bridge: BridgeClient) -> None:
    body = {"dockerfile": "FROM host\nRUN echo built > /who\n", "names": ["mine:1"]}
    async with bridge.http.post("/api/builds", json=body) as response:
        assert "event: image" in await response.text()
    async with bridge.http.put(f"/api/sandboxes/{bridge.id}", json={"image": "mine:1"}) as created:
        assert created.status == 200, await created.text()
    assert (await bridge.run("cat", "/who")).stdout == b"built\n"
