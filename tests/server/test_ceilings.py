"""Ceilings and quotas of tenants, over the API and the bridge."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from http_response import HttpResponse, fetch
from smokebox.limits import MIB
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import parse_profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PREFIX = "acme-"


@contextlib.asynccontextmanager
async def serve(tmp_path: Path, **ceilings: Any) -> AsyncIterator[RunningServer]:
    """Run a server with keys, and a default profile with these ceilings."""
    (tmp_path / "debian" / "usr").mkdir(parents=True, exist_ok=True)
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        directories={"debian": str(tmp_path / "debian")},
        profiles={"default": parse_profile("test", "default", ceilings)},
    )
    async with run_server(settings) as server:
        yield server


@contextlib.asynccontextmanager
async def as_operator(server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(server.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        yield session


@contextlib.asynccontextmanager
async def as_tenant(
    server: RunningServer, prefix: str = PREFIX, **options: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    """Create a key, and yield a client that has it."""
    async with as_operator(server) as operator:
        body = {"name": prefix or "all", "prefix": prefix, **options}
        key = (await fetch(operator.post("/api/keys", json=body))).body["key"]
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        yield session


@contextlib.asynccontextmanager
async def tenant_of(tmp_path: Path, **ceilings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with serve(tmp_path, **ceilings) as server, as_tenant(server) as tenant:
        yield tenant


async def put(session: aiohttp.ClientSession, id: str = "box", **options: Any) -> HttpResponse:
    return await fetch(session.put(f"/api/sandboxes/{PREFIX}{id}", json=options))


def ceiling_of(response: HttpResponse, status: int = 403) -> str:
    """Return the ceiling that an error names, and check what it says."""
    assert response.status == status, response
    error = response.body["error"]
    ceiling = str(error["fields"]["ceiling"])
    assert f"`{ceiling}` in [profiles.default]" in error["hint"]
    assert error["fields"]["key"]
    return ceiling


@pytest.mark.parametrize(
    ("limits", "ceiling"),
    [
        ({"memory": "5GiB"}, "memory"),
        ({"memory": None}, "memory"),
        ({"disk": None}, "disk"),
        ({"disk": "9GB"}, "disk"),
        ({"pids": None}, "pids"),
        ({"pids": 1025}, "pids"),
        ({"open_files": 1 << 20}, "open_files"),
        ("standard-4", "memory"),
    ],
)
async def test_default_limits_are_the_ceilings_without_a_profile(
    tmp_path: Path, limits: object, ceiling: str
) -> None:
    async with tenant_of(tmp_path) as tenant:
        assert ceiling_of(await put(tenant, limits=limits)) == ceiling
        body = {"id": f"{PREFIX}a", "limits": limits}
        assert ceiling_of(await fetch(tenant.post("/api/sandboxes", json=body))) == ceiling
        assert (await fetch(tenant.get("/api/sandboxes"))).body == {"sandboxes": []}


async def test_sandbox_without_limits_gets_the_ceilings(tmp_path: Path) -> None:
    ceilings = {"memory": "256MiB", "cpu": 0.5, "pids": "unlimited", "sleep_after": 60}
    async with tenant_of(tmp_path, **ceilings) as tenant:
        info = (await put(tenant)).body
        limits = info["limits"]
        assert (limits["memory"], limits["cpu"], limits["pids"]) == (256 * MIB, 0.5, 1024)
        assert info["sleep_after"] == 60
        limits = (await put(tenant, "b", limits={"memory": "128MiB", "pids": None})).body["limits"]
        assert (limits["memory"], limits["cpu"], limits["pids"]) == (128 * MIB, 0.5, None)
        assert ceiling_of(await put(tenant, "b", limits={"memory": "257MiB"})) == "memory"


async def test_cores_of_a_tenant_are_the_ceiling_of_each_sandbox(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, tenant_cpu=0.5) as tenant:
        assert (await put(tenant)).body["limits"]["cpu"] == 0.5
        assert ceiling_of(await put(tenant, "b", limits={"cpu": 1})) == "cpu"


async def test_sandbox_of_the_bridge_gets_the_ceilings(tmp_path: Path) -> None:
    ceilings = {"memory": "256MiB", "sandboxes": 1}
    async with serve(tmp_path, **ceilings) as server, as_tenant(server) as tenant:
        created = await fetch(tenant.post("/v1/sandbox", json={}))
        assert created.status == 200
        info = (await fetch(tenant.get("/api/sandboxes"))).body["sandboxes"][0]
        assert info["limits"]["memory"] == 256 * MIB
        refused = await fetch(tenant.post("/v1/sandbox", json={}))
        assert (refused.status, refused.body["code"]) == (429, "capacity_exceeded")
        assert "`sandboxes` in [profiles.default]" in refused.body["error"]
        # Its other routes create a sandbox at the first call.
        async with tenant.put("/v1/sandbox/abc/file/workspace/x", data=b"x") as response:
            assert response.status == 429, await response.text()
        body = {"argv": ["true"]}
        async with tenant.post("/v1/sandbox/abc/exec", json=body) as response:
            assert response.status == 429 or b"capacity_exceeded" in await response.read()
        assert len(await server.state.host.list()) == 1


async def test_operator_has_no_ceilings(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, memory="256MiB", sandboxes=1) as server,
        as_operator(server) as operator,
    ):
        limits = (await put(operator, "a", limits={"memory": None})).body["limits"]
        assert limits["memory"] is None
        assert (await put(operator, "b", keep_alive=True)).status == 200


@pytest.mark.parametrize("path", ["/", "/var", "/no/such/directory", "..", "unknown"])
async def test_host_directories_are_refused_alike(tmp_path: Path, path: str) -> None:
    async with tenant_of(tmp_path) as tenant:
        response = await put(tenant, image=f"dir:{path}")
        assert (response.status, response.code) == (403, "forbidden")
        assert "[images]" in response.body["error"]["hint"]
        assert response.body["error"]["message"] == f"'dir:{path}' is not an image of this server."


async def test_images_are_those_of_the_profile(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, images=["dir:*"]) as tenant:
        assert ceiling_of(await put(tenant, image="host")) == "images"
        # The default image is an image too.
        assert ceiling_of(await put(tenant)) == "images"


async def test_tier_is_at_least_that_of_the_profile(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, tier="gvisor") as tenant:
        assert ceiling_of(await put(tenant, tier="namespaces")) == "tier"


@pytest.mark.gvisor
async def test_default_tier_of_the_server_is_the_lowest(tmp_path: Path) -> None:
    settings = ServerSettings(
        home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0, tier="gvisor"
    )
    async with run_server(settings) as server, as_tenant(server) as tenant:
        assert ceiling_of(await put(tenant, tier="namespaces")) == "tier"
        assert (await put(tenant)).body["tier"] == "gvisor"


async def test_idle_time_is_limited(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, sleep_after=60) as tenant:
        assert (await put(tenant)).status == 200
        for options in ({"keep_alive": True}, {"sleep_after": "2m"}, {"sleep_after": 61}):
            assert ceiling_of(await put(tenant, **options)) == "sleep_after"
        assert (await put(tenant, sleep_after=30)).body["sleep_after"] == 30


async def test_lifetime_is_limited_and_set_where_it_was_left_out(tmp_path: Path) -> None:
    async with serve(tmp_path, lifetime=3600) as server, as_tenant(server) as tenant:
        info = (await put(tenant)).body
        assert info["expires_at"] == info["created_at"] + 3600
        for options in ({"lifetime": "2h"}, {"lifetime": 3601}, {"lifetime": 1e300}):
            assert ceiling_of(await put(tenant, **options)) == "lifetime"
            assert ceiling_of(await put(tenant, "other", **options)) == "lifetime"
        less = (await put(tenant, lifetime="30m")).body
        assert less["expires_at"] == info["created_at"] + 1800
        more = (await put(tenant, lifetime=3600)).body
        assert more["expires_at"] == info["expires_at"]
        assert (await put(tenant, lifetime=0)).status == 400
        await fetch(tenant.post("/v1/sandbox", json={}))
        found = (await fetch(tenant.get("/api/sandboxes"))).body["sandboxes"]
        assert len(found) == 2
        assert all(one["expires_at"] == one["created_at"] + 3600 for one in found)


async def test_lowered_lifetime_is_for_sandboxes_that_are_created_later(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, lifetime=3600) as tenant:
        info = (await put(tenant)).body
        await fetch(tenant.post(f"/api/sandboxes/{PREFIX}box/sleep"))
    async with serve(tmp_path, lifetime=60) as server, as_tenant(server, overlap=True) as tenant:
        woken = (await fetch(tenant.post(f"/api/sandboxes/{PREFIX}box/wake"))).body
        assert (woken["status"], woken["expires_at"]) == ("active", info["expires_at"])
        assert ceiling_of(await put(tenant, lifetime=3600)) == "lifetime"
        other = (await put(tenant, "other")).body
        assert other["expires_at"] == other["created_at"] + 60


async def test_sandbox_is_not_found_after_its_lifetime_with_its_files(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, lifetime=3600) as tenant:
        info = (await put(tenant)).body
        url = f"/api/sandboxes/{PREFIX}box"
        await fetch(tenant.put(f"{url}/files?path=/workspace/file", data=b"data"))
        await put(tenant, lifetime=time.time() - info["created_at"] + 0.5)
        running = await fetch(tenant.post(f"{url}/exec", json={"command": "sleep 60"}))
        assert running.body["error"]["code"] == "sandbox_gone"
        assert running.body["error"]["fields"]["reason"] == "its lifetime was over"
        assert (await fetch(tenant.post(f"{url}/exec", json={"command": "ls"}))).status == 404
        assert (await fetch(tenant.get(url))).status == 404
        await put(tenant)
        listed = await fetch(tenant.post(f"{url}/exec", json={"command": "ls"}))
        assert listed.body["stdout"] == ""


async def test_number_of_sandboxes_is_limited(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, sandboxes=2) as server,
        as_tenant(server) as tenant,
        as_tenant(server, "other-") as other,
    ):
        for id in ("a", "b"):
            assert (await put(tenant, id)).status == 200
        refused = await put(tenant, "c")
        assert ceiling_of(refused, 429) == "sandboxes"
        assert refused.body["error"]["fields"]["limit"] == 2
        assert (await put(tenant, "a", labels={"x": "y"})).status == 200
        assert (await fetch(other.put("/api/sandboxes/other-a", json={}))).status == 200
        await fetch(tenant.delete(f"/api/sandboxes/{PREFIX}a"))
        assert (await put(tenant, "c")).status == 200


async def test_concurrent_creations_cannot_share_the_last_place(tmp_path: Path) -> None:
    async with serve(tmp_path, sandboxes=3) as server, as_tenant(server) as tenant:
        responses = await asyncio.gather(
            *(put(tenant, str(number)) for number in range(5)),
            *(fetch(tenant.post("/api/sandboxes", json={})) for _ in range(5)),
            *(fetch(tenant.post("/v1/sandbox", json={})) for _ in range(5)),
        )
        assert sum(response.status < 300 for response in responses) == 3
        assert {one.status for one in responses if one.status >= 300} == {429}
        assert len(await server.state.host.list()) == 3


async def test_request_that_races_with_a_destroy_creates_nothing_above_the_quota(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, sandboxes=2, memory="256MiB") as server, as_tenant(server) as tenant:
        box = f"/api/sandboxes/{PREFIX}a"
        for _ in range(10):
            await put(tenant, "a")
            await asyncio.gather(
                fetch(tenant.delete(box)),
                fetch(tenant.post(f"{box}/exec", json={"command": "true"})),
                fetch(tenant.post(f"{box}/exec", json={"command": "true"})),
                put(tenant, "b"),
                put(tenant, "c"),
            )
            found = await server.state.host.list()
            assert len(found) <= 2
            assert {one.limits["memory"] for one in found} <= {256 * MIB}


@pytest.mark.parametrize(
    ("ceilings", "limits", "total"),
    [
        ({"memory": "512MiB", "total_memory": "1GiB"}, {"memory": "512MiB"}, "total_memory"),
        ({"cpu": 2, "total_cpu": 2}, {"cpu": 1}, "total_cpu"),
        ({"disk": "1GB", "total_disk": "1500MB"}, {"disk": "700MB"}, "total_disk"),
    ],
)
async def test_totals_are_limited(
    tmp_path: Path, ceilings: dict[str, Any], limits: dict[str, Any], total: str
) -> None:
    async with tenant_of(tmp_path, **ceilings) as tenant:
        for id in ("a", "b"):
            assert (await put(tenant, id, limits=limits)).status == 200
        assert ceiling_of(await put(tenant, "c", limits=limits), 429) == total
        # A sandbox without limits has the ceilings of one.
        assert ceiling_of(await put(tenant, "c"), 429) == total


async def test_raising_limits_counts_for_the_totals(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, memory="512MiB", total_memory="768MiB") as tenant:
        assert (await put(tenant, "a", limits={"memory": "256MiB"})).status == 200
        assert (await put(tenant, "b", limits={"memory": "256MiB"})).status == 200
        more = {"memory": "512MiB"}
        responses = await asyncio.gather(*(put(tenant, id, limits=more) for id in ("a", "b")))
        assert sorted(response.status for response in responses) == [200, 429]
        less = {"memory": "128MiB"}
        for id in ("a", "b"):
            assert (await put(tenant, id, limits=less)).status == 200


@pytest.mark.parametrize(
    "egress",
    [
        {"internet": True},
        {"allowed_hosts": ["other.test"]},
        {"allowed_hosts": ["*.test"]},
        {"allowed_hosts": ["*"]},
        {"allowed_hosts": ["x.example.com", "example.com"]},
        {"tcp": ["other.test:5432"]},
        {"pass_through": ["other.test"]},
        {"hosts": {"x.example.com": "192.0.2.1:80"}},
        {"outbound": "@client"},
        {"outbound_by_host": {"x.example.com": "@client"}},
    ],
)
async def test_policy_opens_only_the_hosts_of_the_profile(
    tmp_path: Path, egress: dict[str, Any]
) -> None:
    async with tenant_of(tmp_path, egress=["*.example.com", "api.test"]) as tenant:
        assert ceiling_of(await put(tenant, egress=egress)) == "egress"
        allowed = {"allowed_hosts": ["api.test", "*.a.example.com"], "tcp": ["api.test:5432"]}
        assert (await put(tenant, egress=allowed)).status == 200
        url = f"/api/sandboxes/{PREFIX}box/egress"
        assert ceiling_of(await fetch(tenant.put(url, json=egress))) == "egress"
        assert (await fetch(tenant.get(url))).body["settings"] == allowed


@pytest.mark.parametrize(
    "change",
    [
        {"internet": True},
        {"allow": ["api.test", "other.test"]},
        {"outbound": "@client"},
        {"outbound_by_host": {"api.test": "@client"}},
    ],
)
async def test_changes_open_only_the_hosts_of_the_profile(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    async with tenant_of(tmp_path, egress=["api.test"]) as tenant:
        await put(tenant)
        url = f"/api/sandboxes/{PREFIX}box/egress"
        assert ceiling_of(await fetch(tenant.post(f"{url}/changes", json=change))) == "egress"
        assert (await fetch(tenant.get(url))).body["in_force"]["opened_hosts"] == []
        allowed = {"allow": ["api.test"], "deny": ["other.test"], "internet": False}
        assert (await fetch(tenant.post(f"{url}/changes", json=allowed))).status == 200


async def test_server_contacts_only_the_hosts_of_the_profile_for_a_tenant(tmp_path: Path) -> None:
    async with tenant_of(tmp_path, egress=["api.test"]) as tenant:
        await put(tenant)
        box = f"/api/sandboxes/{PREFIX}box"
        clone = {"url": "https://other.test/a.git"}
        assert ceiling_of(await fetch(tenant.post(f"{box}/git/checkout", json=clone))) == "egress"
        bucket = {"bucket": "data", "path": "/data", "anonymous": True}
        for endpoint in ({}, {"endpoint": "https://other.test"}):
            body = {**bucket, **endpoint}
            assert ceiling_of(await fetch(tenant.post(f"{box}/mounts", json=body))) == "egress"


async def test_number_of_backups_is_limited(tmp_path: Path) -> None:
    async with serve(tmp_path, backups=2) as server, as_tenant(server) as tenant:
        await put(tenant)
        url = f"/api/sandboxes/{PREFIX}box/backups"
        responses = await asyncio.gather(*(fetch(tenant.post(url, json={})) for _ in range(4)))
        assert sorted(response.status for response in responses) == [201, 201, 429, 429]
        refused = max(responses, key=lambda response: response.status)
        assert ceiling_of(refused, 429) == "backups"
        backups = (await fetch(tenant.get("/api/backups"))).body["backups"]
        assert len(backups) == 2
        await fetch(tenant.delete(f"/api/backups/{backups[0]['id']}"))
        assert (await fetch(tenant.post(url, json={}))).status == 201


async def test_rate_and_concurrency_are_those_of_the_profile(tmp_path: Path) -> None:
    async with serve(tmp_path, rate=0.001) as server, as_tenant(server) as tenant:
        assert (await fetch(tenant.get("/api/sandboxes"))).status == 200
        assert ceiling_of(await fetch(tenant.get("/api/sandboxes")), 429) == "rate"
    async with serve(tmp_path, concurrency=1) as server, as_tenant(server) as tenant:
        await put(tenant)
        command = json.dumps({"command": "echo hi; sleep 60"})
        path = f"/api/sandboxes/{PREFIX}box/exec/stream"
        headers = {"content-type": "application/json"}
        async with tenant.post(path, data=command, headers=headers) as stream:
            assert b"hi" in await stream.content.readuntil(b"\n\n")
            assert ceiling_of(await fetch(tenant.get("/api/sandboxes")), 429) == "concurrency"


async def test_lowered_profile_does_not_keep_a_tenant_from_its_sandboxes(tmp_path: Path) -> None:
    async with serve(tmp_path, sandboxes=2) as server, as_tenant(server) as tenant:
        await put(tenant, "a", limits={"memory": "512MiB"})
        await put(tenant, "b")
        for id, key in server.state.keys._keys.items():
            lower = parse_profile("test", "default", {"sandboxes": 1, "memory": "256MiB"})
            server.state.keys._keys[id].principal = replace(key.principal, profile=lower)
        assert (await put(tenant, "a", labels={"x": "y"})).status == 200
        assert (await fetch(tenant.post(f"/api/sandboxes/{PREFIX}a/sleep"))).status == 200
        assert (await fetch(tenant.post(f"/api/sandboxes/{PREFIX}a/wake"))).status == 200
        assert ceiling_of(await put(tenant, "c"), 429) == "sandboxes"


async def group_of(server: RunningServer, id: str) -> str:
    row = await server.state.host.sandbox(id).lifecycle.row()
    assert row is not None
    return row.settings.group


async def test_sandboxes_of_a_tenant_share_the_cpu_of_one(tmp_path: Path) -> None:
    """Its keys have one group, other tenants another, and the operator's sandboxes have none."""
    async with (
        serve(tmp_path) as server,
        as_tenant(server) as tenant,
        as_tenant(server, overlap=True) as colleague,
        as_tenant(server, "other-") as other,
        as_operator(server) as operator,
    ):
        await put(tenant, "one")
        await put(colleague, "two")
        await fetch(other.put("/api/sandboxes/other-box", json={}))
        await fetch(operator.put(f"/api/sandboxes/{PREFIX}mine", json={}))
        # One of the operator's that the tenant may fork.
        await fetch(tenant.post(f"/api/sandboxes/{PREFIX}mine/fork", json={"ids": [f"{PREFIX}3"]}))
        ids = (f"{PREFIX}one", f"{PREFIX}two", "other-box", f"{PREFIX}mine", f"{PREFIX}3")
        groups = [await group_of(server, id) for id in ids]
    assert groups[0] == groups[1] != ""
    assert groups[2] not in ("", groups[0])
    assert groups[3:] == ["", groups[0]]
