"""Snapshots and forks of tenants: names and access of a key, and what counts against its quotas."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp

from http_response import fetch
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import parse_profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BOX = "/api/sandboxes/acme-box"


@contextlib.asynccontextmanager
async def serve(
    tmp_path: Path, *, backups: str | None = None, **ceilings: Any
) -> AsyncIterator[RunningServer]:
    """Run a server with keys, and a default profile with these ceilings."""
    settings = ServerSettings(
        backups=backups,
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        profiles={"default": parse_profile("test", "default", ceilings)},
    )
    async with run_server(settings) as server:
        yield server


@contextlib.asynccontextmanager
async def operator(server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(server.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        yield session


@contextlib.asynccontextmanager
async def tenant(server: RunningServer, prefix: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Create a key, and yield a client that has it."""
    async with operator(server) as admin:
        body = {"name": prefix, "prefix": prefix}
        key = (await fetch(admin.post("/api/keys", json=body))).body["key"]
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        yield session


async def test_a_snapshot_may_replace_the_oldest_at_the_limit(tmp_path: Path) -> None:
    async with serve(tmp_path, snapshots=2) as server, tenant(server, "acme") as acme:
        await fetch(acme.put(BOX, json={}))
        body = {"keep_last": 2}
        made = [await fetch(acme.post(f"{BOX}/snapshots", json=body)) for _ in range(3)]
        assert [one.status for one in made] == [201, 201, 201]
        listed = (await fetch(acme.get("/api/snapshots"))).body["snapshots"]
        assert [one["id"] for one in listed] == [one.body["id"] for one in made[1:]]
        named = await fetch(acme.post(f"{BOX}/snapshots", json={"name": "x", **body}))
        assert named.status == 429
        refused = await fetch(acme.delete(f"{BOX}/snapshots"))
        assert (refused.status, refused.body["error"]["fields"]["option"]) == (400, "keep_last")
        removed = await fetch(acme.delete(f"{BOX}/snapshots?keep_last=1&keep_for=0.000001"))
        assert removed.body["snapshots"] == listed[:1]


async def test_a_key_imports_its_own_snapshots_within_its_ceilings(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    bucket = (tmp_path / "bucket").as_uri()
    async with (
        serve(tmp_path, backups=bucket, snapshots=1) as server,
        tenant(server, "acme") as acme,
        tenant(server, "evil") as evil,
    ):
        await fetch(acme.put(BOX, json={}))
        await fetch(acme.put(f"{BOX}/files?path=f", data=b"1"))
        made = (await fetch(acme.post(f"{BOX}/snapshots", json={"name": "one"}))).body
        url = f"/api/snapshots/{made['id']}/export"
        assert (await fetch(evil.post(url))).status == 403
        assert (await fetch(acme.post(url))).body == made
        await fetch(acme.delete(f"/api/snapshots/{made['id']}"))
        body = {"id": made["id"]}
        assert (await fetch(evil.post("/api/snapshots/import", json=body))).status == 403
        found = await fetch(acme.post("/api/snapshots/import", json=body))
        assert (found.status, found.body["name"]) == (201, "one")
        again = await fetch(acme.post("/api/snapshots/import", json=body))
        assert again.status == 409
        await fetch(acme.put("/api/sandboxes/acme-new", json={"snapshot": "one"}))
        read = await fetch(acme.get("/api/sandboxes/acme-new/files?path=f"))
        assert read.status == 200
        await fetch(acme.delete("/api/snapshots/one"))
        assert (await fetch(acme.post(f"{BOX}/snapshots", json={}))).status == 201
        assert (await fetch(acme.post("/api/snapshots/import", json=body))).status == 429


async def test_number_of_snapshots_is_limited(tmp_path: Path) -> None:
    async with serve(tmp_path, snapshots=2) as server, tenant(server, "acme") as acme:
        await fetch(acme.put(BOX, json={}))
        made = [await fetch(acme.post(f"{BOX}/snapshots", json={})) for _ in range(3)]
        assert [one.status for one in made] == [201, 201, 429]
        assert made[2].body["error"]["fields"]["ceiling"] == "snapshots"
        first = made[0].body["id"]
        restore = f"{BOX}/snapshots/{first}/restore"
        assert (await fetch(acme.post(restore, json={"save_as": "x"}))).status == 429
        await fetch(acme.delete(f"/api/snapshots/{first}"))
        assert (await fetch(acme.post(f"{BOX}/snapshots", json={}))).status == 201


async def test_forks_count_as_sandboxes_all_or_none(tmp_path: Path) -> None:
    async with serve(tmp_path, sandboxes=3) as server, tenant(server, "acme") as acme:
        await fetch(acme.put(BOX, json={}))
        refused = await fetch(acme.post(f"{BOX}/fork", json={"count": 3}))
        assert refused.status == 429
        assert len((await fetch(acme.get("/api/sandboxes"))).body["sandboxes"]) == 1
        assert (await fetch(acme.post(f"{BOX}/fork", json={"count": 2}))).status == 201
        foreign = await fetch(acme.post(f"{BOX}/fork", json={"ids": ["other-box"]}))
        assert foreign.status == 403


async def test_snapshots_of_destroyed_sandboxes_count_as_disk(tmp_path: Path) -> None:
    ceilings = {"disk": "20MB", "total_disk": "30MB"}
    async with serve(tmp_path, **ceilings) as server, tenant(server, "acme") as acme:
        await fetch(acme.put(BOX, json={}))
        write = {"command": "head -c 9000000 /dev/urandom > f"}
        assert (await fetch(acme.post(f"{BOX}/exec", json=write))).body["exit_code"] == 0
        made = await fetch(acme.post(f"{BOX}/snapshots", json={}))
        assert made.status == 201, made.body
        await fetch(acme.delete(BOX))
        body = {"limits": {"disk": "20MB"}}
        assert (await fetch(acme.put("/api/sandboxes/acme-a", json=body))).status == 200
        other = await fetch(acme.put("/api/sandboxes/acme-b", json={"limits": {"disk": "9MB"}}))
        assert (other.status, other.body["error"]["fields"]["ceiling"]) == (429, "total_disk")
        await fetch(acme.delete(f"/api/snapshots/{made.body['id']}"))
        other = await fetch(acme.put("/api/sandboxes/acme-b", json={"limits": {"disk": "9MB"}}))
        assert other.status == 200


async def test_names_of_snapshots_are_those_of_a_key(tmp_path: Path) -> None:
    async with (
        serve(tmp_path) as server,
        tenant(server, "acme") as acme,
        tenant(server, "other") as other,
    ):
        url = "/api/sandboxes/other-box"
        for client, box, text in ((acme, BOX, b"acme"), (other, url, b"other")):
            await fetch(client.put(box, json={}))
            await fetch(client.put(f"{box}/files?path=f", data=text))
            made = await fetch(client.post(f"{box}/snapshots", json={"name": "prepared"}))
            assert made.status == 201
        created = await fetch(other.put(f"{url}2", json={"image": "snapshot:prepared"}))
        assert created.status == 200, created.body
        async with other.get(f"{url}2/files?path=f") as response:
            assert await response.text() == "other"
        own = (await fetch(acme.get("/api/snapshots/prepared"))).body["id"]
        stolen = await fetch(other.put(f"{url}3", json={"snapshot": own}))
        assert stolen.status == 403
        async with operator(server) as admin:
            for name, status in (("prepared", 404), (own, 200)):
                assert (await fetch(admin.get(f"/api/snapshots/{name}"))).status == status


async def test_a_policy_above_the_ceilings_is_not_forked(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, egress=["api.github.com"]) as server,
        tenant(server, "acme") as acme,
        operator(server) as admin,
    ):
        await fetch(acme.put(BOX, json={}))
        await fetch(admin.put(f"{BOX}/egress", json={"allowed_hosts": ["internal.example"]}))
        refused = await fetch(acme.post(f"{BOX}/fork", json={}))
        assert (refused.status, refused.body["error"]["fields"]["ceiling"]) == (403, "egress")
        assert (await fetch(admin.post(f"{BOX}/fork", json={}))).status == 201


async def test_checkpoints_count_against_the_quota_of_the_tenant(tmp_path: Path) -> None:
    async with serve(tmp_path, snapshots=2) as server, tenant(server, "acme") as acme:
        await fetch(acme.put(BOX, json={"checkpoints": {"every": 1, "keep_last": 5}}))
        command = {"command": "while :; do date +%N > now; sleep 0.1; done"}
        await fetch(acme.post(f"{BOX}/processes", json=command))
        async with asyncio.timeout(20):
            while (info := (await fetch(acme.get(BOX))).body)["checkpoint_error"] is None:
                await asyncio.sleep(0.1)
        assert "of the quota snapshots" in info["checkpoint_error"]
        listed = (await fetch(acme.get("/api/snapshots"))).body["snapshots"]
        assert [one["origin"] for one in listed] == ["interval", "interval"]
        # Those that are replaced make room for the next.
        await fetch(acme.put(BOX, json={"checkpoints": {"every": 1, "keep_last": 2}}))
        async with asyncio.timeout(20):
            found = listed
            # For a moment there is one more.
            while found == listed or len(found) != 2:
                await asyncio.sleep(0.1)
                found = (await fetch(acme.get("/api/snapshots"))).body["snapshots"]
        refused = await fetch(acme.post(f"{BOX}/snapshots", json={"name": "mine"}))
        assert refused.status == 429
