"""A tenant's key against the operator, another tenant and the host, on every route of the server.

The requests are generated from the tables of routes, so that a new route is attacked too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import aiohttp
import msgspec
import pytest_asyncio

from attack.sandbox_code import Canary
from http_response import fetch
from smokebox.server.compat.bridge import app as bridge
from smokebox.server.routes import all_endpoints, all_sockets
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire import API

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from smokebox.isolation import Tier
    from smokebox.server.endpoint import ApiEndpoint

VICTIM = "victim-box"
SECRET = "f3b1-the-secret-of-the-victim"
PART = re.compile(r"\{(\w+)(?::path)?\}")
# A stream ends when the client has seen enough of it.
STREAM_SECONDS = 0.3
# They end the server, or show every tenant the same page.
UNCHECKED = {"system_shutdown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The status and the body of a response; a stream is cut."""

    status: int
    text: str


@dataclass(slots=True, kw_only=True)
class World:
    """A server with the sandbox and the objects of a victim, and a key of another tenant.

    `parts` are the names of the victim's objects, by the names of parameters in paths.
    """

    server: RunningServer
    operator: aiohttp.ClientSession
    victim: aiohttp.ClientSession
    parts: dict[str, str]

    async def key(self, **options: Any) -> dict[str, str]:
        """Create a key, and return the header that has it."""
        body = {"name": "attacker", **options}
        created = await fetch(self.operator.post("/api/keys", json=body))
        return {"authorization": f"Bearer {created.body['key']}"}

    async def send(
        self, method: str, path: str, headers: dict[str, str], **options: Any
    ) -> Response:
        """Send a request over TCP."""
        async with (
            aiohttp.ClientSession(self.server.url, headers=headers) as session,
            session.request(method, path, **options) as response,
        ):
            pieces: list[bytes] = []
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(
                    STREAM_SECONDS if response.content_type == "text/event-stream" else None
                ):
                    while piece := await response.content.readany():
                        pieces.append(piece)
            return Response(status=response.status, text=b"".join(pieces).decode(errors="replace"))

    async def connect(self, path: str, headers: dict[str, str]) -> int:
        """Open a WebSocket, and return the status of its handshake."""
        async with aiohttp.ClientSession(self.server.url, headers=headers) as session:
            try:
                async with session.ws_connect(path):
                    return 101
            except aiohttp.WSServerHandshakeError as refused:
                return refused.status

    async def check_unharmed(self) -> None:
        """Assert that the victim has everything it had."""
        url = f"/api/sandboxes/{VICTIM}"
        assert (await fetch(self.victim.get(url))).body["generation"] == 1
        async with self.victim.get(f"{url}/files?path=secret") as response:
            assert await response.text() == SECRET
        process = (await fetch(self.victim.get(f"{url}/processes/p"))).body
        assert process["status"] == "running"
        for path in ("sessions/s", "terminals/t", "code/contexts/c"):
            assert (await fetch(self.victim.get(f"{url}/{path}"))).status == 200, path
        backup = f"/api/backups/{self.parts['backup']}"
        assert (await fetch(self.victim.get(backup))).status == 200
        snapshot = f"/api/snapshots/{self.parts['snapshot']}"
        assert (await fetch(self.victim.get(snapshot))).status == 200
        assert [key["name"] for key in (await self.keys())[:1]] == ["victim"]

    async def keys(self) -> list[dict[str, Any]]:
        """List all keys."""
        keys: list[dict[str, Any]] = (await fetch(self.operator.get("/api/keys"))).body["keys"]
        return keys


@pytest_asyncio.fixture
async def world(tmp_path: Path, tier: Tier) -> AsyncIterator[World]:
    """Serve a victim's sandbox with one object of each kind."""
    settings = ServerSettings(
        home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0, tier=tier
    )
    async with (
        run_server(settings) as server,
        aiohttp.ClientSession(
            "http://localhost", connector=aiohttp.UnixConnector(server.socket)
        ) as operator,
    ):
        body = {"name": "victim", "prefix": "victim"}
        key = (await fetch(operator.post("/api/keys", json=body))).body
        headers = {"authorization": f"Bearer {key['key']}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as victim:
            parts = {"id": VICTIM, "key": key["id"], **await create_objects(victim)}
            yield World(server=server, operator=operator, victim=victim, parts=parts)


async def create_objects(victim: aiohttp.ClientSession) -> dict[str, str]:
    """Create the victim's sandbox and its objects; return their names by parameter of paths."""
    url = f"/api/sandboxes/{VICTIM}"
    assert (await fetch(victim.put(url, json={"env": {"TOKEN": SECRET}}))).status == 200
    async with victim.put(f"{url}/files?path=secret", data=SECRET.encode()) as response:
        assert response.status == 200
    for path, body in (
        ("sessions", {"id": "s"}),
        ("terminals", {"id": "t"}),
        ("processes", {"id": "p", "command": f"echo {SECRET}; exec sleep 1000"}),
        ("code/contexts", {"id": "c"}),
        ("ports", {"port": 8080}),
    ):
        made = await fetch(victim.post(f"{url}/{path}", json=body))
        assert made.status in (200, 201), (path, made)
    backup = (await fetch(victim.post(f"{url}/backups", json={}))).body["id"]
    snapshot = (await fetch(victim.post(f"{url}/snapshots", json={}))).body["id"]
    return {
        "session": "s",
        "terminal": "t",
        "process": "p",
        "context": "c",
        "port": "8080",
        "backup": backup,
        "snapshot": snapshot,
    }


def fill(path: str, parts: dict[str, str]) -> str:
    """Return a path with values for its parameters. Fails for a parameter without a value."""
    return PART.sub(lambda part: parts[part[1]], path)


def bridge_routes() -> Iterator[tuple[str, str, bool]]:
    """Yield method, path and whether it reads, for each route of the bridge."""
    for route in bridge._ROUTES:
        if route.path != "/v1/sandbox/{id}/pty":
            yield route.method, route.path, route.reads


BRIDGE_PARTS = {"id": "abc", "path": "workspace/secret", "sid": "s", "port": "8080"}


async def test_no_route_serves_another_tenant(world: World) -> None:
    attacker = await world.key(prefix="attacker")
    failed: list[object] = []
    for endpoint in all_endpoints():
        if endpoint.public or endpoint.name in UNCHECKED:
            continue
        response = await world.send(
            endpoint.method, API + fill(endpoint.path, world.parts), attacker, json={}
        )
        # Those without a name in their path list the sender's own, or create something.
        refused = endpoint.admin or bool(PART.search(endpoint.path))
        if refused != (response.status == 403):
            failed.append((endpoint.name, response))
        if SECRET in response.text or f'"id":"{VICTIM}"' in response.text:
            failed.append((endpoint.name, response))
    for socket in all_sockets():
        status = await world.connect(API + fill(socket.path, world.parts), attacker)
        if status != 403:
            failed.append((socket.path, status))
    assert failed == []
    await world.check_unharmed()


async def test_objects_of_another_tenant_are_not_found_from_an_own_sandbox(world: World) -> None:
    attacker = await world.key(prefix="attacker")
    parts = {**world.parts, "id": "attacker-box"}
    failed: list[object] = []
    for endpoint in all_endpoints():
        if "{id}" not in endpoint.path:
            continue
        own = f"{API}/sandboxes/attacker-box"
        assert (await world.send("PUT", own, attacker, json={})).status == 200
        path = API + fill(endpoint.path, parts)
        response = await world.send(endpoint.method, path, attacker, json={})
        if SECRET in response.text or VICTIM in response.text or response.status == 500:
            failed.append((endpoint.name, response))
    assert failed == []
    await world.check_unharmed()


async def test_no_route_tells_which_sandboxes_exist(world: World) -> None:
    attacker = await world.key(prefix="attacker")
    different: list[object] = []
    for endpoint in all_endpoints():
        if "{id}" in endpoint.path:
            found = []
            for id in (VICTIM, "victim-none"):
                path = API + fill(endpoint.path, {**world.parts, "id": id})
                response = await world.send(endpoint.method, path, attacker, json={})
                text = re.sub(r'"request_id":"[^"]*"', "", response.text.replace(id, "ID"))
                found.append((response.status, text))
            if found[0] != found[1]:
                different.append((endpoint.name, found))
    assert different == []


async def test_every_route_needs_a_key(world: World) -> None:
    failed: list[object] = []
    for headers in ({}, {"authorization": "Bearer sbx_000000000000_" + "0" * 64}):
        for endpoint in all_endpoints():
            path = API + fill(endpoint.path, world.parts)
            response = await world.send(endpoint.method, path, headers, json={})
            if not endpoint.public and response.status != 401:
                failed.append((endpoint.name, response))
        for socket in all_sockets():
            status = await world.connect(API + fill(socket.path, world.parts), headers)
            if status != 401:
                failed.append((socket.path, status))
        for method, path, _ in bridge_routes():
            response = await world.send(method, fill(path, BRIDGE_PARTS), headers, json={})
            if response.status != 401:
                failed.append((path, response))
    assert failed == []
    await world.check_unharmed()


async def test_every_route_needs_a_scope(world: World) -> None:
    agent = await world.key(prefix="victim", scopes=["agents", "runs", "approvals"])
    reader = await world.key(prefix="victim", scopes=["sandboxes:read"])
    failed: list[object] = []
    for endpoint in all_endpoints():
        if endpoint.public:
            continue
        path = API + fill(endpoint.path, world.parts)
        for headers in [agent] if endpoint.reads and not endpoint.admin else [agent, reader]:
            response = await world.send(endpoint.method, path, headers, json={})
            if response.status != 403:
                failed.append((endpoint.name, response))
    for method, path, reads in bridge_routes():
        for headers in [agent] if reads else [agent, reader]:
            response = await world.send(method, fill(path, BRIDGE_PARTS), headers, json={})
            if response.status != 403:
                failed.append((path, response))
    for socket in all_sockets():
        for headers in (agent, reader):
            status = await world.connect(API + fill(socket.path, world.parts), headers)
            if status != 403:
                failed.append((socket.path, status))
    assert failed == []
    await world.check_unharmed()


async def test_bridge_routes_do_not_serve_another_tenant(world: World) -> None:
    attacker = await world.key(prefix="attacker")
    box = "/v1/sandbox/abc"
    async with world.victim.put(f"{box}/file/workspace/secret", data=SECRET.encode()) as made:
        assert made.status == 200
    failed: list[object] = []
    for method, path, _ in bridge_routes():
        response = await world.send(method, fill(path, BRIDGE_PARTS), attacker, json={})
        refused = response.status == 403
        if SECRET in response.text or response.status == 500 or ("/pool/" in path) != refused:
            failed.append((path, response))
    assert failed == []
    async with world.victim.get(f"{box}/file/workspace/secret") as kept:
        assert await kept.text() == SECRET
    await world.check_unharmed()


def fields_of(kind: type | None) -> dict[str, Any]:
    """Return the types of a body or a query by name."""
    return {} if kind in (None, bytes) else get_type_hints(kind)


def takes_text(hint: Any) -> bool:
    return hint is str or (
        any(takes_text(part) for part in get_args(hint)) and (get_origin(hint) is not dict)
    )


def example(hint: Any, text: str) -> Any:
    """Return a value of a type, with that text where it has text."""
    if list in (get_origin(hint), *(get_origin(part) for part in get_args(hint))):
        return [text]
    return text if takes_text(hint) else 1


def attempts(endpoint: ApiEndpoint, text: str) -> Iterator[dict[str, Any]]:
    """Yield options of requests that have the text in one field of the body or of the query."""
    for place, kind in (("json", endpoint.body), ("params", endpoint.query)):
        hints = fields_of(kind)
        if kind is None or not hints:
            continue
        required = {
            field.name: example(hints[field.name], text)
            for field in msgspec.structs.fields(kind)
            if field.required
        }
        if "timeout" in hints:
            required["timeout"] = 0.2
        for name, hint in hints.items():
            if takes_text(hint):
                yield {place: {**required, name: example(hint, text)}}


async def test_no_route_reads_a_file_of_the_host(world: World, canary: Canary) -> None:
    attacker = await world.key(prefix="attacker")
    parts = {**world.parts, "id": "attacker-box"}
    url = f"{API}/sandboxes/attacker-box"
    failed: list[object] = []
    for endpoint in all_endpoints():
        if endpoint.admin or endpoint.public:
            continue
        assert (await world.send("PUT", url, attacker, json={})).status == 200
        for text in (canary.secret, f"dir:{canary.folder}"):
            for options in attempts(endpoint, text):
                async with asyncio.timeout(20):
                    path = API + fill(endpoint.path, parts)
                    response = await world.send(endpoint.method, path, attacker, **options)
                if Canary.TEXT in response.text or response.status == 500:
                    failed.append((endpoint.name, options, response))
    assert failed == []
    await world.check_unharmed()
