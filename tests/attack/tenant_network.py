"""Attempts of a tenant to reach private addresses, and public ones of the host itself.

`test_tenant_network.py` runs these tests in a network namespace that has the addresses below.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from http_response import fetch
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.handlers import (
    Content,
    ForwardFrame,
    HandleFrame,
    RespondFrame,
    ServeFrame,
    UnforwardedFrame,
    from_server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

OWN = "93.184.216.34"
PRIVATE = "10.9.8.7"
GRANTED = f"{PRIVATE}/32"
HOSTILE = [
    "127.0.0.1",
    "::1",
    "::ffff:127.0.0.1",
    "0.0.0.0",
    PRIVATE,
    "169.254.169.254",
    OWN,
    f"::ffff:{OWN}",
]
SECONDS = 20.0


@dataclass
class Service:
    """A service of the host that listens on all addresses, and counts its connections."""

    port: int = 0
    connections: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer.get_extra_info("sockname")[0])
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
        writer.close()


@dataclass(frozen=True)
class Clients:
    """Clients of one server: its operator, and a tenant."""

    operator: aiohttp.ClientSession
    tenant: aiohttp.ClientSession


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    """Run a service on every address of the host."""
    service = Service()
    async with await asyncio.start_server(service.serve, "0.0.0.0", 0) as server:
        service.port = server.sockets[0].getsockname()[1]
        async with await asyncio.start_server(service.serve, "::", service.port):
            yield service


@contextlib.asynccontextmanager
async def run_clients(home: Path, *private_networks: str) -> AsyncIterator[Clients]:
    """Run a server with keys, and connect both clients."""
    settings = ServerSettings(
        home=str(home), host="127.0.0.1", keys=True, pool=0, private_networks=private_networks
    )
    async with run_server(settings) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as operator:
            body = {"name": "tenant", "prefix": "a-"}
            key = (await fetch(operator.post("/api/keys", json=body))).body["key"]
            headers = {"authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(server.url, headers=headers) as tenant:
                yield Clients(operator, tenant)


@pytest_asyncio.fixture
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    """Clients of a server whose operator granted nothing."""
    async with run_clients(tmp_path / "home") as clients:
        yield clients


async def put(client: aiohttp.ClientSession, egress: dict[str, Any]) -> Any:
    return await fetch(client.put("/api/sandboxes/a-box", json={"egress": egress}))


async def connect(client: aiohttp.ClientSession, host: str, port: int) -> str:
    """Send a request from the sandbox; return the exit code of curl and its output."""
    command = f'curl -s -m 5 http://{host}:{port}/; echo " $?"'
    url = "/api/sandboxes/a-box/exec"
    return str((await fetch(client.post(url, json={"command": command}))).body["stdout"]).strip()


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@pytest.mark.parametrize("address", HOSTILE)
async def test_named_address_is_refused(clients: Clients, service: Service, address: str) -> None:
    for target in (in_url(address), f"{in_url(address)}:{service.port}"):
        egress = {"hosts": {"x.test": target}, "tcp": [f"x.test:{service.port}"]}
        refused = await put(clients.tenant, egress)
        assert (refused.status, refused.code) == (403, "forbidden"), refused
        assert "[network]" in refused.body["error"]["hint"]
    assert (await fetch(clients.tenant.get("/api/sandboxes/a-box"))).status == 404


@pytest.mark.parametrize("address", HOSTILE)
async def test_address_in_the_policy_is_refused(
    clients: Clients, service: Service, address: str
) -> None:
    """For the operator too: `internet` and `tcp` grant no address of the host."""
    for client in (clients.tenant, clients.operator):
        egress = {"internet": True, "tcp": [f"{in_url(address)}:{service.port}"]}
        assert (await put(client, egress)).status == 200
        assert "secret" not in await connect(client, in_url(address), service.port)
    assert not service.connections


async def test_name_that_leads_to_the_host_is_refused(clients: Clients, service: Service) -> None:
    egress = {"hosts": {"x.test": "localhost"}, "tcp": [f"x.test:{service.port}"]}
    assert (await put(clients.tenant, egress)).status == 200
    assert "secret" not in await connect(clients.tenant, "x.test", service.port)
    log = await fetch(clients.tenant.get("/api/sandboxes/a-box/egress/log"))
    event = log.body["events"][-1]
    assert (event["verdict"], event["rule"]) == ("refused", "private")
    assert "the operator of the server can grant it" in event["reason"]
    assert not service.connections


async def test_operator_grants_an_address_by_naming_it(clients: Clients, service: Service) -> None:
    egress = {"hosts": {"x.test": f"127.0.0.1:{service.port}"}, "allowed_hosts": ["x.test"]}
    assert (await put(clients.operator, egress)).status == 200
    assert await connect(clients.tenant, "x.test", 80) == "secret 0"
    # A tenant cannot send the same policy, nor keep the grant with another one.
    assert (await put(clients.tenant, egress)).status == 403
    assert await connect(clients.tenant, "x.test", 80) == "secret 0"
    egress = {"hosts": {"x.test": "localhost"}, "tcp": [f"x.test:{service.port}"]}
    assert (await put(clients.tenant, egress)).status == 200
    service.connections.clear()
    assert "secret" not in await connect(clients.tenant, "x.test", service.port)
    assert not service.connections


async def test_handler_of_a_tenant_cannot_forward_to_the_host(
    clients: Clients, service: Service
) -> None:
    assert (await put(clients.tenant, {"outbound_by_host": {"x.test": "@client"}})).status == 200
    async with clients.tenant.ws_connect("/api/sandboxes/a-box/egress/handlers") as socket:
        serve = ServeFrame(number=1, slots=["x.test"])
        await socket.send_str(msgspec.json.encode(serve).decode())
        assert json.loads((await socket.receive(SECONDS)).data)["type"] == "serving"
        request = asyncio.create_task(connect(clients.tenant, "x.test", 80))
        handle = from_server((await socket.receive(SECONDS)).data)
        assert isinstance(handle, HandleFrame)
        for number, address in enumerate(HOSTILE, 1):
            forward = ForwardFrame(
                id=handle.id,
                number=number,
                method="GET",
                url=handle.url,
                headers=[],
                content=Content(),
                to=f"http://{in_url(address)}:{service.port}",
            )
            await socket.send_str(msgspec.json.encode(forward).decode())
            response = from_server((await socket.receive(SECONDS)).data)
            assert isinstance(response, UnforwardedFrame), response
        respond = RespondFrame(id=handle.id, status=200, headers=[], content=Content(data=b"no"))
        await socket.send_str(msgspec.json.encode(respond).decode())
        assert await request == "no 0"
    assert not service.connections


@pytest.mark.parametrize("address", HOSTILE)
async def test_repository_on_the_host_is_refused(
    clients: Clients, service: Service, address: str
) -> None:
    await put(clients.tenant, {})
    body = {"url": f"http://{in_url(address)}:{service.port}/x.git"}
    refused = await fetch(clients.tenant.post("/api/sandboxes/a-box/git/checkout", json=body))
    assert refused.status == 400, refused
    assert "[network]" in refused.body["error"]["hint"]
    assert not service.connections


@pytest.mark.parametrize("address", HOSTILE)
async def test_store_on_the_host_is_refused(
    clients: Clients, service: Service, address: str
) -> None:
    await put(clients.tenant, {})
    body = {
        "bucket": "data",
        "path": "/data",
        "endpoint": f"http://{in_url(address)}:{service.port}",
        "access_key": "k",
        "secret_key": "s",
        "allow_http": True,
    }
    refused = await fetch(clients.tenant.post("/api/sandboxes/a-box/mounts", json=body))
    assert refused.status in (400, 503), refused
    assert not service.connections


async def test_granted_network_is_reached_and_no_other(tmp_path: Path, service: Service) -> None:
    async with run_clients(tmp_path / "home", GRANTED, f"127.0.0.1:{service.port + 1}") as clients:
        egress = {"hosts": {"db.test": PRIVATE}, "tcp": [f"db.test:{service.port}"]}
        assert (await put(clients.tenant, egress)).status == 200
        assert await connect(clients.tenant, "db.test", service.port) == "secret 0"
        egress = {"hosts": {"x.test": f"127.0.0.1:{service.port}"}}
        assert (await put(clients.tenant, egress)).status == 403
        assert service.connections == [PRIVATE]
