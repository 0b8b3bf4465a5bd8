"""Backups over HTTP: made, restored, refused, and whose they are."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio

from asking import ask
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BOX = "/api/sandboxes/box"
BACKUPS = f"{BOX}/backups"


@pytest_asyncio.fixture
async def box(http: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """The API, with a sandbox that has one file."""
    await ask(http.put(BOX, json={}))
    await write(http, "1")
    return http


async def write(http: aiohttp.ClientSession, text: str) -> None:
    await ask(http.put(f"{BOX}/files?path=f", data=text.encode()))


async def read(http: aiohttp.ClientSession) -> str:
    async with http.get(f"{BOX}/files?path=f") as answer:
        return await answer.text()


async def test_one_is_made_listed_restored_and_removed(box: aiohttp.ClientSession) -> None:
    made = await ask(box.post(BACKUPS, json={"name": "first", "ttl": 3600}))
    assert (made.status, made.body["name"], made.body["path"]) == (201, "first", "/workspace")
    assert made.body["expires_at"] == made.body["created_at"] + 3600
    id = made.body["id"]
    for query in ("", "?sandbox=box", "?prefix=b"):
        assert (await ask(box.get(f"/api/backups{query}"))).body == {"backups": [made.body]}
    for query in ("?sandbox=other", "?prefix=x"):
        assert (await ask(box.get(f"/api/backups{query}"))).body == {"backups": []}
    assert (await ask(box.get(f"/api/backups/{id}"))).body == made.body
    await write(box, "2")
    restored = await ask(box.post(f"{BACKUPS}/{id}/restore", json={}))
    assert (restored.status, restored.body["path"], restored.body["files"]) == (
        200,
        "/workspace",
        1,
    )
    assert await read(box) == "1"
    assert (await ask(box.get(f"{BACKUPS}/progress"))).body == {"progress": []}
    for _ in range(2):
        assert (await ask(box.delete(f"/api/backups/{id}"))).status == 204
    gone = await ask(box.post(f"{BACKUPS}/{id}/restore", json={}))
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
async def test_what_cannot_be_made_says_why(
    box: aiohttp.ClientSession, body: dict[str, object], status: int, code: str
) -> None:
    answer = await ask(box.post(BACKUPS, json=body))
    assert (answer.status, answer.code) == (status, code)
    assert (await ask(box.get("/api/backups"))).body == {"backups": []}


async def test_who_leaves_breaks_it_off(box: aiohttp.ClientSession, server: RunningServer) -> None:
    endless = {"command": "for i in $(seq 50); do truncate -s 4G $i || exit; done"}
    assert (await ask(box.post(f"{BOX}/exec", json=endless))).body["exit_code"] == 0
    making = asyncio.create_task(ask(box.post(BACKUPS, json={})))
    seen = 0
    while not seen:
        under_way = (await ask(box.get(f"{BACKUPS}/progress"))).body["progress"]
        seen = under_way[0]["bytes"] if under_way else 0
    assert under_way[0]["operation"] == "create"
    making.cancel()
    folder = os.path.join(server.state.settings.home, "backups")
    while os.listdir(folder) or (await ask(box.get(f"{BACKUPS}/progress"))).body["progress"]:
        await asyncio.sleep(0.01)
    assert (await ask(box.get("/api/backups"))).body == {"backups": []}


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server that wants keys by TCP."""
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        yield server


async def test_a_key_has_the_backups_of_its_own_sandboxes_only(guarded: RunningServer) -> None:
    connector = aiohttp.UnixConnector(guarded.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as owner:
        clients = {}
        for prefix in ("a-", "b-"):
            key = await ask(owner.post("/api/keys", json={"name": prefix, "prefix": prefix}))
            headers = {"authorization": f"Bearer {key.body['key']}"}
            clients[prefix] = aiohttp.ClientSession(guarded.url, headers=headers)
        ours, theirs = clients["a-"], clients["b-"]
        async with ours, theirs:
            await ask(ours.put("/api/sandboxes/a-box", json={}))
            await ask(theirs.put("/api/sandboxes/b-box", json={}))
            made = await ask(ours.post("/api/sandboxes/a-box/backups", json={}))
            id = made.body["id"]
            assert (await ask(theirs.get("/api/backups"))).body == {"backups": []}
            assert (await ask(theirs.get("/api/backups?sandbox=a-box"))).code == "forbidden"
            for request in (
                theirs.get(f"/api/backups/{id}"),
                theirs.delete(f"/api/backups/{id}"),
                theirs.post(f"/api/sandboxes/b-box/backups/{id}/restore", json={}),
                theirs.post(f"/api/sandboxes/a-box/backups/{id}/restore", json={}),
            ):
                refused = await ask(request)
                assert (refused.status, refused.code) == (403, "forbidden")
            # Also after the sandbox is gone, and to its owner from any other.
            await ask(ours.delete("/api/sandboxes/a-box"))
            refused = await ask(theirs.get(f"/api/backups/{id}"))
            assert refused.status == 403
            # Not even the name of it is told.
            assert "a-box" not in str(refused.body)
            await ask(ours.put("/api/sandboxes/a-two", json={}))
            restored = await ask(
                ours.post(f"/api/sandboxes/a-two/backups/{id}/restore", json={"path": "/copy"})
            )
            assert restored.status == 200
            assert (await ask(owner.get("/api/backups"))).body == {"backups": [made.body]}
