"""Prefixes, profiles and scopes of keys."""

from __future__ import annotations

import contextlib
import sqlite3
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from http_response import HttpResponse, fetch
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.profile import parse_profile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.tenancy.profile import Profile

SMALL = parse_profile("test", "small", {"memory": "256MiB", "sandboxes": 2})


def settings(tmp_path: Path, *profiles: Profile) -> ServerSettings:
    return ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        profiles={profile.name: profile for profile in profiles},
    )


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with run_server(settings(tmp_path, SMALL)) as server:
        yield server


async def create(http: aiohttp.ClientSession, **options: Any) -> HttpResponse:
    return await fetch(http.post("/api/keys", json={"name": "test", **options}))


@contextlib.asynccontextmanager
async def client_of(
    server: RunningServer, http: aiohttp.ClientSession, **options: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"authorization": f"Bearer {(await create(http, **options)).body['key']}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        yield session


async def test_prefix_ends_in_a_hyphen(http: aiohttp.ClientSession) -> None:
    assert (await create(http, prefix="team")).body["prefix"] == "team-"
    assert (await create(http, prefix="other-")).body["prefix"] == "other-"
    assert (await create(http)).body["prefix"] == ""


@pytest.mark.parametrize("prefix", ["acme-", "acme-x", "a"])
async def test_overlapping_prefix_is_refused(http: aiohttp.ClientSession, prefix: str) -> None:
    for first in ("acme", "a-b"):
        assert (await create(http, prefix=first)).status == 201
    profile = "small"
    refused = await create(http, prefix=prefix, profile=profile)
    assert (refused.status, refused.code) == (409, "conflict")
    assert "--overlap" in refused.body["error"]["hint"]
    assert (await create(http, prefix=prefix, profile=profile, overlap=True)).status == 201


async def test_prefixes_that_only_look_alike_do_not_overlap(http: aiohttp.ClientSession) -> None:
    for prefix in ("team", "teammate", "", "tea"):
        assert (await create(http, prefix=prefix)).status == 201
    # Keys of one tenant, such as a new one before the old one is revoked.
    assert (await create(http, prefix="team")).status == 201


async def test_expired_and_revoked_keys_do_not_overlap(http: aiohttp.ClientSession) -> None:
    assert (await create(http, prefix="a", expires_in=1e-6)).status == 201
    revoked = (await create(http, prefix="b")).body
    await fetch(http.delete(f"/api/keys/{revoked['id']}"))
    for prefix in ("a-x", "b-x"):
        assert (await create(http, prefix=prefix)).status == 201


async def test_key_has_the_ceilings_of_its_profile(
    server: RunningServer, http: aiohttp.ClientSession
) -> None:
    async with client_of(server, http, prefix="s", profile="small") as tenant:
        for id in ("s-a", "s-b"):
            info = (await fetch(tenant.put(f"/api/sandboxes/{id}", json={}))).body
            assert info["limits"]["memory"] == 256 << 20
        refused = await fetch(tenant.put("/api/sandboxes/s-c", json={}))
        assert refused.status == 429
        assert "[profiles.small]" in refused.body["error"]["hint"]
    key = (await fetch(http.get("/api/keys"))).body["keys"][0]
    shown = (await fetch(http.get(f"/api/keys/{key['id']}"))).body
    assert shown["ceilings"]["memory"] == 256 << 20
    quotas = {one["name"]: (one["used"], one["ceiling"]) for one in shown["quotas"]}
    assert quotas["sandboxes"] == (2, 2)
    assert quotas["total_memory"] == (512 << 20, None)


async def test_unknown_profile_names_the_nearest(http: aiohttp.ClientSession) -> None:
    refused = await create(http, profile="smal")
    assert refused.status == 400
    assert "Did you mean 'small'?" in refused.body["error"]["hint"]


async def test_key_whose_profile_was_removed_is_refused(tmp_path: Path) -> None:
    async with run_server(settings(tmp_path, SMALL)) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            created = (await create(http, prefix="s", profile="small")).body
    headers = {"authorization": f"Bearer {created['key']}"}
    async with (
        run_server(settings(tmp_path)) as server,
        aiohttp.ClientSession(server.url, headers=headers) as tenant,
    ):
        refused = await fetch(tenant.get("/api/sandboxes"))
        assert (refused.status, refused.code) == (403, "forbidden")
        assert "[profiles.small]" in refused.body["error"]["hint"]
    async with (
        run_server(settings(tmp_path, SMALL)) as server,
        aiohttp.ClientSession(server.url, headers=headers) as tenant,
    ):
        assert (await fetch(tenant.get("/api/sandboxes"))).status == 200


async def test_read_key_reads_and_streams(
    server: RunningServer, http: aiohttp.ClientSession
) -> None:
    await fetch(http.put("/api/sandboxes/box", json={}))
    await fetch(http.post("/api/sandboxes/box/exec", json={"command": "echo hi > a"}))
    body = {"command": "echo started", "id": "p"}
    await fetch(http.post("/api/sandboxes/box/processes", json=body))
    async with client_of(server, http, scopes=["sandboxes:read"]) as reader:
        assert (await fetch(reader.get("/api/sandboxes"))).body["sandboxes"][0]["id"] == "box"
        async with reader.get("/api/sandboxes/box/files?path=a") as response:
            assert await response.read() == b"hi\n"
        wait = {"pattern": "started"}
        url = "/api/sandboxes/box/processes/p"
        assert (await fetch(reader.post(f"{url}/wait_for_log", json=wait))).status == 200
        async with reader.get(f"{url}/logs/stream") as stream:
            assert b"started" in await stream.content.read()


async def test_read_key_changes_nothing(server: RunningServer, http: aiohttp.ClientSession) -> None:
    await fetch(http.put("/api/sandboxes/box", json={}))
    async with client_of(server, http, scopes=["sandboxes:read"]) as reader:
        for method, path in (
            ("PUT", "/api/sandboxes/new"),
            ("POST", "/api/sandboxes"),
            ("PUT", "/api/sandboxes/box"),
            ("DELETE", "/api/sandboxes/box"),
            ("POST", "/api/sandboxes/box/exec"),
            ("POST", "/api/sandboxes/box/exec/stream"),
            ("POST", "/api/sandboxes/box/files/mkdir"),
            ("PUT", "/api/sandboxes/box/egress"),
            ("POST", "/v1/sandbox"),
            ("POST", "/v1/sandbox/abc/exec"),
            # These would create it.
            ("GET", "/v1/sandbox/abc/file/workspace/x"),
            ("POST", "/v1/sandbox/abc/persist"),
        ):
            async with reader.request(method, path, json={}) as response:
                assert response.status == 403, (method, path, await response.text())
                assert "sandboxes:write" in await response.text()
        for path in ("terminals/t", "processes/p/stdio", "ports/80/connection", "egress/handlers"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await reader.ws_connect(f"/api/sandboxes/box/{path}")
            assert caught.value.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await reader.ws_connect("/v1/sandbox/abc/pty")
        assert caught.value.status == 403
    assert [one.id for one in await server.state.host.list()] == ["box"]


async def test_key_for_agents_does_not_reach_sandboxes(
    server: RunningServer, http: aiohttp.ClientSession
) -> None:
    async with client_of(server, http, scopes=["agents", "runs:read"]) as agent:
        for path in ("/api/sandboxes", "/api/backups", "/v1/sandbox/abc/running"):
            async with agent.get(path) as response:
                assert response.status == 403
                assert "sandboxes:read" in await response.text()


async def test_keys_of_an_earlier_version_have_the_default_profile(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    secret = "ab" * 32
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / "keys.db")) as file, file:
        file.execute(
            "CREATE TABLE keys (id TEXT PRIMARY KEY, name TEXT NOT NULL, hash BLOB NOT NULL, "
            "prefix TEXT NOT NULL, admin INTEGER NOT NULL, created_at REAL NOT NULL, "
            "expires_at REAL, last_used_at REAL)"
        )
        values = (sha256(secret.encode()).digest(),)
        file.execute(
            "INSERT INTO keys VALUES ('0123456789ab', 'old', ?, 'ci', 0, 5, NULL, NULL)", values
        )
        file.execute("PRAGMA user_version = 1")
        file.execute(f"PRAGMA application_id = {0x534D4B4B}")
    headers = {"authorization": f"Bearer sbx_0123456789ab_{secret}"}
    async with (
        run_server(settings(tmp_path)) as server,
        aiohttp.ClientSession(server.url, headers=headers) as tenant,
    ):
        assert (await fetch(tenant.put("/api/sandboxes/ci1", json={}))).status == 200
        above = {"limits": {"memory": None}}
        assert (await fetch(tenant.put("/api/sandboxes/ci2", json=above))).status == 403
        info = server.state.keys.get("0123456789ab")
        assert (info.prefix, info.profile, len(info.scopes)) == ("ci", "default", 8)
