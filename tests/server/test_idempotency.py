"""Idempotency keys: repeated requests create one object, also across crashes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
from typing import TYPE_CHECKING

import aiohttp
import pytest

from http_response import fetch
from killable_server import new_home, run_killable_server
from smokebox.server import idempotency
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from pathlib import Path

SANDBOX = "/api/sandboxes/box"
KEY = {"idempotency-key": "a key"}
RUN_ONCE = {"command": "echo x >> /workspace/ran; sleep 60"}


async def test_repeated_request_returns_the_same_object(http: aiohttp.ClientSession) -> None:
    created = await fetch(
        http.post("/api/sandboxes", json={"labels": {"a": "1", "b": "2"}}, headers=KEY)
    )
    # The same request with another formatting.
    text, json = '{"labels":  {"b": "2", "a": "1"}}', {"content-type": "application/json"}
    again = await fetch(http.post("/api/sandboxes", data=text, headers={**KEY, **json}))
    assert (created.status, again.status) == (201, 201)
    assert created.body["id"] == again.body["id"]
    assert len((await fetch(http.get("/api/sandboxes"))).body["sandboxes"]) == 1


async def test_every_kind_of_object_supports_idempotency_keys(http: aiohttp.ClientSession) -> None:
    await fetch(http.put(SANDBOX, json={}))
    for noun, body in (
        ("sessions", {}),
        ("processes", {"command": "sleep 60"}),
        ("terminals", {}),
        ("backups", {}),
    ):
        headers = {"idempotency-key": noun}
        responses = [
            await fetch(http.post(f"{SANDBOX}/{noun}", json=body, headers=headers))
            for _ in range(3)
        ]
        assert [response.status for response in responses] == [201] * 3
        assert len({response.body["id"] for response in responses}) == 1
        listing = "/api/backups" if noun == "backups" else f"{SANDBOX}/{noun}"
        assert len((await fetch(http.get(listing))).body[noun]) == 1


async def test_concurrent_requests_with_one_key_create_one_object(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.put(SANDBOX, json={}))
    responses = await asyncio.gather(
        *(fetch(http.post(f"{SANDBOX}/processes", json=RUN_ONCE, headers=KEY)) for _ in range(20))
    )
    assert {response.status for response in responses} == {201}
    assert len((await fetch(http.get(f"{SANDBOX}/processes"))).body["processes"]) == 1


async def test_key_of_a_different_request_is_a_conflict(http: aiohttp.ClientSession) -> None:
    await fetch(http.put(SANDBOX, json={}))
    await fetch(http.post(f"{SANDBOX}/sessions", json={}, headers=KEY))
    for path, body in (("sessions", {"cwd": "/tmp"}), ("terminals", {})):
        response = await fetch(http.post(f"{SANDBOX}/{path}", json=body, headers=KEY))
        error = response.body["error"]
        assert (response.status, error["code"]) == (409, "conflict")
        assert "'a key'" in error["message"]


async def test_taken_id_is_a_conflict_also_with_a_key(http: aiohttp.ClientSession) -> None:
    await fetch(http.put(SANDBOX, json={}))
    await fetch(http.post(f"{SANDBOX}/sessions", json={"id": "one"}))
    for _ in range(2):
        for path, body in (
            ("/api/sandboxes", {"id": "box"}),
            (f"{SANDBOX}/sessions", {"id": "one"}),
        ):
            key = {"idempotency-key": path}
            response = await fetch(http.post(path, json=body, headers=key))
            assert (response.status, response.code) == (409, "conflict")


async def test_concurrent_requests_for_one_id_create_it_once(http: aiohttp.ClientSession) -> None:
    for id, keys in (("plain", [""] * 5), ("keyed", list("abcde"))):
        responses = await asyncio.gather(
            *(
                fetch(http.post("/api/sandboxes", json={"id": id}, headers=_header(key)))
                for key in keys
            )
        )
        assert sorted(response.status for response in responses) == [201, 409, 409, 409, 409]


async def test_repeated_request_for_a_deleted_object_is_not_found(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.put(SANDBOX, json={}))
    body = {"id": "one"}
    await fetch(http.post(f"{SANDBOX}/sessions", json=body, headers=KEY))
    await fetch(http.delete(f"{SANDBOX}/sessions/one"))
    response = await fetch(http.post(f"{SANDBOX}/sessions", json=body, headers=KEY))
    assert (response.status, response.code) == (404, "not_found")
    # An object that another key created with the same id is not returned.
    other = await fetch(
        http.post(f"{SANDBOX}/sessions", json=body, headers={"idempotency-key": "b"})
    )
    assert other.status == 201
    response = await fetch(http.post(f"{SANDBOX}/sessions", json=body, headers=KEY))
    assert (response.status, response.code) == (409, "conflict")


async def test_failed_request_releases_its_key(http: aiohttp.ClientSession) -> None:
    await fetch(http.put(SANDBOX, json={}))
    bad = await fetch(http.post(f"{SANDBOX}/processes", json={"command": ["nope"]}, headers=KEY))
    good = await fetch(http.post(f"{SANDBOX}/processes", json={"command": ["true"]}, headers=KEY))
    assert (bad.status, good.status) == (404, 201)


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "ümlaut"])
async def test_invalid_idempotency_keys_are_refused(http: aiohttp.ClientSession, key: str) -> None:
    response = await fetch(http.post("/api/sandboxes", json={}, headers={"idempotency-key": key}))
    assert (response.status, response.code) == (400, "invalid_option")


async def test_existing_sandbox_is_not_created_again(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    first = await fetch(http.post("/api/sandboxes", json={"id": "box", "labels": {"a": "b"}}))
    again = await fetch(http.post("/api/sandboxes", json={"id": "box", "labels": {}}))
    assert (first.status, again.status, again.code) == (201, 409, "conflict")
    for body in ({"id": "Not An Id"}, {"id": 1}, {"idd": "x"}, {"limits": {"nope": 1}}):
        response = await fetch(http.post("/api/sandboxes", json=body))
        assert (response.status, response.code) == (400, "invalid_option")
    missing = await fetch(http.post("/api/sandboxes", json={"image": "/no/such/image"}))
    assert missing.status in (400, 404)
    assert not any(sandbox.lifecycle.has_pending_options for sandbox in server.state.host._changed)
    listed = (await fetch(http.get("/api/sandboxes"))).body["sandboxes"]
    assert [(item["id"], item["labels"]) for item in listed] == [("box", {"a": "b"})]


async def test_idempotency_keys_are_separate_per_api_key(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "keyed"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as http:
        created = []
        for name in ("a", "b"):
            key = await server.state.keys.create(CreateKey(name=name, prefix=f"{name}-"))
            headers = {**KEY, "authorization": f"Bearer {key.key}"}
            created += [await fetch(http.post("/api/sandboxes", headers=headers)) for _ in range(2)]
            taken = await fetch(http.post("/api/sandboxes", json={"id": "x"}, headers=headers))
            assert (taken.status, taken.code) == (403, "forbidden")
    ids = [response.body["id"] for response in created]
    assert (ids[0], ids[2]) == (ids[1], ids[3])
    assert [id[:2] for id in ids] == ["a-", "a-", "b-", "b-"]


async def test_old_and_excess_requests_are_pruned(
    http: aiohttp.ClientSession, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MOST_KEPT", 10)
    monkeypatch.setattr(idempotency, "_PRUNE_EVERY", 1)
    await fetch(http.put(SANDBOX, json={}))
    for number in range(20):
        headers = {"idempotency-key": str(number)}
        await fetch(http.post(f"{SANDBOX}/sessions", json={"id": f"s{number}"}, headers=headers))
    assert _stored_requests(server) <= 11
    newest = await fetch(
        http.post(f"{SANDBOX}/sessions", json={"id": "s19"}, headers={"idempotency-key": "19"})
    )
    assert newest.status == 201
    monkeypatch.setattr(idempotency, "KEPT_SECONDS", -1.0)
    await fetch(
        http.post(f"{SANDBOX}/sessions", json={"id": "last"}, headers={"idempotency-key": "last"})
    )
    assert _stored_requests(server) == 1


@pytest.mark.timeout(90)
async def test_retry_after_a_kill_during_process_start_starts_one_process() -> None:
    line = _random_line(130)
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={}))
        async with run_killable_server(home, kill_at=line) as http:
            await _request_until_killed(http, f"{SANDBOX}/processes", RUN_ONCE)
        async with run_killable_server(home) as http:
            responses = [
                await fetch(http.post(f"{SANDBOX}/processes", json=RUN_ONCE, headers=KEY))
                for _ in range(2)
            ]
            ids = {response.body["id"] for response in responses}
            assert {response.status for response in responses} == {201}, line
            listed = (await fetch(http.get(f"{SANDBOX}/processes"))).body["processes"]
            assert [item["id"] for item in listed] == list(ids), line
            wait = "while [ ! -s ran ]; do sleep 0.01; done; cat ran; pgrep -c sleep"
            ran = await fetch(http.post(f"{SANDBOX}/exec", json={"command": wait, "timeout": 10}))
            assert ran.body["stdout"] == "x\n1\n", line
            await fetch(http.delete(SANDBOX))


@pytest.mark.timeout(90)
async def test_retry_after_a_kill_during_sandbox_creation_creates_one_sandbox() -> None:
    line = _random_line(170)
    with new_home() as home:
        async with run_killable_server(home, kill_at=line) as http:
            await _request_until_killed(http, "/api/sandboxes", {})
        async with run_killable_server(home) as http:
            response = await fetch(http.post("/api/sandboxes", json={}, headers=KEY))
            created = response.body["id"]
            listed = (await fetch(http.get("/api/sandboxes"))).body["sandboxes"]
            assert (response.status, [item["id"] for item in listed]) == (201, [created]), line
            await fetch(http.delete(f"/api/sandboxes/{created}"))


def _stored_requests(server: RunningServer) -> int:
    path = os.path.join(server.state.settings.home, "server.db")
    with contextlib.closing(sqlite3.connect(path)) as file:
        [(count,)] = file.execute("SELECT count(*) FROM requests")
    return int(count)


async def _request_until_killed(
    http: aiohttp.ClientSession, path: str, body: dict[str, str]
) -> None:
    """Send a request to a server that may be killed by it."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(path, json=body, headers=KEY) as response:
            assert response.status == 201
            await response.read()


def _random_line(most: int) -> int:
    """Return a random line. SMOKEBOX_KILL_AT repeats a run that failed."""
    return int(os.environ.get("SMOKEBOX_KILL_AT", "0")) or random.randrange(1, most)


def _header(key: str) -> dict[str, str]:
    return {"idempotency-key": key} if key else {}
