"""ADD of a URL by a tenant: builds reach no address that the tenant may not reach itself."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from attack.hostile_server import PRIVATE, respond_with
from registry_server import RegistryProxy
from smokebox.egress.pattern import HostPattern
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import Profile
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ADDRESSES = (*PRIVATE, "2130706433", "0x7f.1")


@pytest_asyncio.fixture
async def victim() -> AsyncIterator[RegistryProxy]:
    """A server of this host that only its own user may reach."""
    async with RegistryProxy(None).open() as server:
        yield server


@pytest_asyncio.fixture
async def server(tmp_path: Path, hostile: RegistryProxy) -> AsyncIterator[RunningServer]:
    """A server with keys of tenants."""
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        private_networks=(hostile.authority,),
        profiles={
            "narrow": Profile(name="narrow", egress=(HostPattern.parse("egress", "files.test"),))
        },
    )
    async with run_server(settings) as server:
        yield server


@contextlib.asynccontextmanager
async def tenant(
    server: RunningServer, profile: str | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client with the key of a tenant."""
    key = await server.state.keys.create(CreateKey(name="k", prefix="acme", profile=profile))
    headers = {"authorization": f"Bearer {key.key}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        yield session


def everything(*servers: RegistryProxy) -> dict[str, Any]:
    """Return a policy that allows all hosts on the ports of servers, and those of the web."""
    return {"internet": True, "tcp": [f"*:{one.port}" for one in servers]}


async def add(session: aiohttp.ClientSession, url: str, egress: dict[str, Any]) -> dict[str, Any]:
    """Build with an ADD of a URL, and return the error."""
    body = {"dockerfile": f"FROM scratch\nADD {url} /stolen\n", "egress": egress}
    async with session.post("/api/builds", json=body) as response:
        text = await response.text()
    if response.content_type == "application/json":
        found: dict[str, Any] = json.loads(text)["error"]
        return found
    assert "event: error" in text, text
    found = json.loads(text.strip().rpartition("data: ")[2])
    return found


@pytest.mark.parametrize("host", ADDRESSES)
async def test_private_address_is_not_contacted(
    server: RunningServer, victim: RegistryProxy, host: str
) -> None:
    async with tenant(server) as acme:
        for port in ("", f":{victim.port}"):
            error = await add(acme, f"http://{host}{port}/latest/", everything(victim))
            assert error["code"] == "build_failed", error
            # The policy is not what refuses it.
            assert "does not allow" not in error["message"], error
    assert victim.seen == []


@pytest.mark.parametrize("host", ADDRESSES)
async def test_redirect_to_a_private_address_is_not_followed(
    server: RunningServer, hostile: RegistryProxy, victim: RegistryProxy, host: str
) -> None:
    egress = everything(hostile, victim)
    async with tenant(server) as acme:
        for port in (victim.port, 80):
            location = f"http://{host}:{port}/latest/"
            hostile.faults[:] = [respond_with(302, location=location)]
            error = await add(acme, f"http://{hostile.authority}/{port}", egress)
            assert error["code"] == "build_failed", error
    assert [path for _, path in hostile.seen] == [f"/{victim.port}", "/80"]
    assert victim.seen == []


async def test_ceiling_of_the_key_holds(server: RunningServer, hostile: RegistryProxy) -> None:
    url = f"http://{hostile.authority}/"
    async with tenant(server, "narrow") as narrow:
        for egress in ({"internet": True}, {"allowed_hosts": ["127.0.0.1"]}):
            error = await add(narrow, url, egress)
            assert (error["code"], error["fields"]["ceiling"]) == ("forbidden", "egress")
        for egress in ({}, {"allowed_hosts": ["files.test"]}):
            error = await add(narrow, url, egress)
            assert error["code"] == "build_failed"
            assert "does not allow 127.0.0.1" in error["message"]
    assert hostile.seen == []
