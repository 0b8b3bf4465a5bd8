"""Snapshots and forks over HTTP, and the quotas of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from http_response import fetch

if TYPE_CHECKING:
    import aiohttp

SANDBOX = "/api/sandboxes/box"
SNAPSHOTS = f"{SANDBOX}/snapshots"


async def write(http: aiohttp.ClientSession, text: str, sandbox: str = SANDBOX) -> None:
    await fetch(http.put(f"{sandbox}/files?path=f", data=text.encode()))


async def read(http: aiohttp.ClientSession, sandbox: str = SANDBOX) -> str:
    async with http.get(f"{sandbox}/files?path=f") as response:
        return await response.text()


async def test_snapshot_is_made_listed_compared_restored_and_deleted(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.put(SANDBOX, json={}))
    await write(http, "1")
    body = {"name": "first", "description": "text", "labels": {"a": "b"}}
    made = await fetch(http.post(SNAPSHOTS, json=body))
    assert (made.status, made.body["name"], made.body["labels"]) == (201, "first", {"a": "b"})
    id = made.body["id"]
    for query in ("", "?sandbox=box", "?prefix=b"):
        listed = await fetch(http.get(f"/api/snapshots{query}"))
        assert listed.body == {"snapshots": [made.body]}
    assert (await fetch(http.get("/api/snapshots?prefix=x"))).body == {"snapshots": []}
    for name in (id, "first"):
        assert (await fetch(http.get(f"/api/snapshots/{name}"))).body == made.body
    await write(http, "2")
    present = await fetch(http.get(f"{SNAPSHOTS}/first/diff?texts=true"))
    assert present.body["changed"] == ["/workspace/f"]
    assert "+2" in present.body["texts"]["/workspace/f"]
    restored = await fetch(http.post(f"{SNAPSHOTS}/first/restore", json={"save_as": "second"}))
    assert (restored.status, restored.body["id"]) == (200, id)
    assert await read(http) == "1"
    compared = await fetch(http.get("/api/snapshots/first/diff?to=second"))
    assert compared.body["changed"] == ["/workspace/f"]
    for _ in range(2):
        assert (await fetch(http.delete(f"/api/snapshots/{id}"))).status == 204
    gone = await fetch(http.post(f"{SNAPSHOTS}/{id}/restore", json={}))
    assert (gone.status, gone.body["error"]["fields"]["kind"]) == (404, "snapshot")


async def test_repeated_requests_make_one_snapshot_and_one_set_of_forks(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.put(SANDBOX, json={}))
    headers = {"Idempotency-Key": "key"}
    first, second = [await fetch(http.post(SNAPSHOTS, json={}, headers=headers)) for _ in range(2)]
    assert first.body == second.body
    headers = {"Idempotency-Key": "other"}
    first, second = [
        await fetch(http.post(f"{SANDBOX}/fork", json={"count": 2}, headers=headers))
        for _ in range(2)
    ]
    assert first.status == 201
    assert first.body == second.body
    assert len((await fetch(http.get("/api/sandboxes"))).body["sandboxes"]) == 3


async def test_sandbox_is_created_from_a_snapshot_by_name(http: aiohttp.ClientSession) -> None:
    await fetch(http.put(SANDBOX, json={}))
    await write(http, "1")
    made = (await fetch(http.post(SNAPSHOTS, json={"name": "prepared"}))).body
    other = "/api/sandboxes/other"
    for body in ({"image": "snapshot:prepared"}, {"snapshot": "prepared"}):
        created = await fetch(http.put(other, json=body))
        assert (created.status, created.body["snapshot"]) == (200, made["id"])
    assert await read(http, other) == "1"
    await fetch(http.delete("/api/snapshots/prepared"))
    # A program may name it at each start.
    assert (await fetch(http.put(other, json={"snapshot": "prepared"}))).status == 200
    missing = await fetch(http.put("/api/sandboxes/third", json={"snapshot": "prepared"}))
    assert (missing.status, missing.body["error"]["fields"]["kind"]) == (404, "snapshot")


async def test_fork_refuses_what_it_cannot_do(http: aiohttp.ClientSession) -> None:
    await fetch(http.put(SANDBOX, json={}))
    memory = await fetch(http.post(f"{SANDBOX}/fork", json={"memory": True}))
    assert memory.body["error"]["code"] == "unsupported"
    taken = await fetch(http.post(f"{SANDBOX}/fork", json={"ids": ["box"]}))
    assert taken.status == 409
    assert (await fetch(http.post("/api/sandboxes/none/fork", json={}))).status == 404
