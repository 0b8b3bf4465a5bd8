"""Backups over HTTP: creation, restore, cancellation and access."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio

from http_response import fetch
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SANDBOX = "/api/sandboxes/box"
BACKUPS = f"{SANDBOX}/backups"


@pytest_asyncio.fixture
async def api(http: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """A client of a server that has a sandbox with one file."""
    await fetch(http.put(SANDBOX, json={}))
    await write(http, "1")
    return http


async def write(http: aiohttp.ClientSession, text: str) -> None:
    await fetch(http.put(f"{SANDBOX}/files?path=f", data=text.encode()))


async def read(http: aiohttp.ClientSession) -> str:
    async with http.get(f"{SANDBOX}/files?path=f") as response:
        return await response.text()


async def test_backup_is_created_listed_restored_and_deleted(api: aiohttp.ClientSession) -> None:
    created = await fetch(api.post(BACKUPS, json={"name": "first", "ttl": 3600}))
    assert (created.status, created.body["name"], created.body["path"]) == (
        201,
        "first",
        "/workspace",
    )
    assert created.body["expires_at"] == created.body["created_at"] + 3600
    id = created.body["id"]
    for query in ("", "?sandbox=box", "?prefix=b"):
        assert (await fetch(api.get(f"/api/backups{query}"))).body == {"backups": [created.body]}
    for query in ("?sandbox=other", "?prefix=x"):
        assert (await fetch(api.get(f"/api/backups{query}"))).body == {"backups": []}
    assert (await fetch(api.get(f"/api/backups/{id}"))).body == created.body
    await write(api, "2")
    restored = await fetch(api.post(f"{BACKUPS}/{id}/restore", json={}))
    assert (restored.status, restored.body["path"], restored.body["files"]) == (
        200,
        "/workspace",
        1,
    )
    assert await read(api) == "1"
    assert (await fetch(api.get(f"{BACKUPS}/progress"))).body == {"progress": []}
    for _ in range(2):
        assert (await fetch(api.delete(f"/api/backups/{id}"))).status == 204
    gone = await fetch(api.post(f"{BACKUPS}/{id}/restore", json={}))
    assert (gone.status, gone.code, gone.body["error"]["fields"]["kind"]) == (
        404,
        "not_found",
        "backup",
    )


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"path": "/none"}, 404, "path_not_found"),
        ({"path": "f"}, 400, "path_not_directory"),
        ({"path": "/"}, 400, "path_error"),
        ({"path": ""}, 400, "invalid_path"),
        ({"ttl": -1}, 400, "invalid_option"),
        ({"compression": 99}, 400, "invalid_option"),
        ({"excludes": "x"}, 400, "invalid_option"),
        ({"timeout": 0.000001}, 504, "deadline_exceeded"),
        ({"unknown": 1}, 400, "invalid_option"),
    ],
)
async def test_invalid_backups_are_refused(
    api: aiohttp.ClientSession, body: dict[str, object], status: int, code: str
) -> None:
    response = await fetch(api.post(BACKUPS, json=body))
    assert (response.status, response.code) == (status, code)
    assert (await fetch(api.get("/api/backups"))).body == {"backups": []}


async def test_disconnect_cancels_a_backup(
    api: aiohttp.ClientSession, server: RunningServer
) -> None:
    large = {"command": "for i in $(seq 50); do truncate -s 4G $i || exit; done"}
    assert (await fetch(api.post(f"{SANDBOX}/exec", json=large))).body["exit_code"] == 0
    creating = asyncio.create_task(fetch(api.post(BACKUPS, json={})))
    copied = 0
    while not copied:
        progress = (await fetch(api.get(f"{BACKUPS}/progress"))).body["progress"]
        copied = progress[0]["bytes"] if progress else 0
    assert progress[0]["operation"] == "create"
    creating.cancel()
    folder = os.path.join(server.state.settings.home, "backups")
    while os.listdir(folder) or (await fetch(api.get(f"{BACKUPS}/progress"))).body["progress"]:
        await asyncio.sleep(0.01)
    assert (await fetch(api.get("/api/backups"))).body == {"backups": []}


@pytest_asyncio.fixture
async def keyed_server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server that requires keys over TCP."""
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        yield server


async def test_key_with_a_prefix_is_limited_to_its_backups(keyed_server: RunningServer) -> None:
    connector = aiohttp.UnixConnector(keyed_server.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as owner:
        clients = {}
        for prefix in ("a-", "b-"):
            key = await fetch(owner.post("/api/keys", json={"name": prefix, "prefix": prefix}))
            headers = {"authorization": f"Bearer {key.body['key']}"}
            clients[prefix] = aiohttp.ClientSession(keyed_server.url, headers=headers)
        ours, theirs = clients["a-"], clients["b-"]
        async with ours, theirs:
            await fetch(ours.put("/api/sandboxes/a-box", json={}))
            await fetch(theirs.put("/api/sandboxes/b-box", json={}))
            created = await fetch(ours.post("/api/sandboxes/a-box/backups", json={}))
            id = created.body["id"]
            assert (await fetch(theirs.get("/api/backups"))).body == {"backups": []}
            assert (await fetch(theirs.get("/api/backups?sandbox=a-box"))).code == "forbidden"
            for request in (
                theirs.get(f"/api/backups/{id}"),
                theirs.delete(f"/api/backups/{id}"),
                theirs.post(f"/api/sandboxes/b-box/backups/{id}/restore", json={}),
                theirs.post(f"/api/sandboxes/a-box/backups/{id}/restore", json={}),
            ):
                refused = await fetch(request)
                assert (refused.status, refused.code) == (403, "forbidden")
            # Also after the sandbox is destroyed; its owner may restore into any other.
            await fetch(ours.delete("/api/sandboxes/a-box"))
            refused = await fetch(theirs.get(f"/api/backups/{id}"))
            assert refused.status == 403
            # Not even its name is disclosed.
            assert "a-box" not in str(refused.body)
            await fetch(ours.put("/api/sandboxes/a-two", json={}))
            restored = await fetch(
                ours.post(f"/api/sandboxes/a-two/backups/{id}/restore", json={"path": "/copy"})
            )
            assert restored.status == 200
            assert (await fetch(owner.get("/api/backups"))).body == {"backups": [created.body]}
