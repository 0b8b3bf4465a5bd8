"""API keys over HTTP: who gets in, for what, and what nobody gets to read."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server that wants keys by TCP."""
    async with run_server(_settings(tmp_path)) as server:
        yield server


@pytest_asyncio.fixture
async def owner(guarded: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    """Whoever has its unix socket."""
    connector = aiohttp.UnixConnector(guarded.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        yield session


@pytest_asyncio.fixture
async def stranger(guarded: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    """Whoever has its address only."""
    async with aiohttp.ClientSession(guarded.url) as session:
        yield session


def _settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)


async def _create(owner: aiohttp.ClientSession, **options: object) -> dict[str, Any]:
    answer = await owner.post("/api/keys", json={"name": "test", **options})
    assert answer.status == 201
    made: dict[str, Any] = await answer.json()
    return made


async def _get(
    session: aiohttp.ClientSession, authorization: str | None, path: str = "/api/sandboxes"
) -> tuple[int, dict[str, Any], str | None]:
    headers = {} if authorization is None else {"authorization": authorization}
    async with session.get(path, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers.get("www-authenticate")


async def test_a_server_without_keys_says_how_to_make_one(
    stranger: aiohttp.ClientSession,
) -> None:
    status, body, challenge = await _get(stranger, None)
    assert (status, body["error"]["code"], challenge) == (401, "unauthorized", "Bearer")
    assert "smokebox keys create" in body["error"]["hint"]


async def test_a_key_opens_the_server_however_its_scheme_is_spelled(
    owner: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    key = (await _create(owner))["key"]
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert (await _get(stranger, f"{scheme} {key}"))[0] == 200


async def test_what_is_not_a_key_is_refused(
    owner: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    key = (await _create(owner))["key"]
    other = key[:-1] + ("0" if key[-1] != "0" else "1")
    unknown = key.replace(key.split("_")[1], "0" * 12)
    for told in (f"Bearer {other}", f"Bearer {unknown}", "Bearer", "Bearer x", f"Basic {key}", ""):
        status, body, challenge = await _get(stranger, told)
        assert (status, body["error"]["code"]) == (401, "unauthorized"), told
        assert challenge == 'Bearer error="invalid_token"'
        assert key.split("_")[2] not in str(body)


async def test_an_expired_key_says_so(
    owner: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    made = await _create(owner, expires_in=0.05)
    deadline = time.monotonic() + 5
    while (answer := await _get(stranger, f"Bearer {made['key']}"))[0] == 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert answer[0] == 401
    assert answer[1]["error"]["message"] == f"the key {made['id']} has expired."


async def test_the_key_of_a_socket_may_be_in_its_url(
    owner: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    key = (await _create(owner))["key"]
    path = "/api/sandboxes/ghost/terminals/t"
    for session, query, status in (
        (stranger, "", 401),
        (stranger, "?authorization=Bearer%20sbx_0_0", 401),
        (stranger, f"?authorization=Bearer%20{key}", 404),
        (owner, f"?authorization=Bearer%20{key}", 404),
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(path + query)
        assert caught.value.status == status
    # Not of other requests: their URLs are in everybody's logs.
    assert (await _get(stranger, None, f"/api/sandboxes?authorization=Bearer%20{key}"))[0] == 401


async def test_a_revoked_key_opens_nothing_from_that_moment(
    owner: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    made = await _create(owner)
    assert (await owner.delete(f"/api/keys/{made['id']}")).status == 204
    assert (await _get(stranger, f"Bearer {made['key']}"))[0] == 401
    async with owner.delete(f"/api/keys/{made['id']}") as answer:
        assert answer.status == 404
    assert await (await owner.get("/api/keys")).json() == {"keys": []}


async def test_a_key_with_a_prefix_is_for_its_sandboxes_only(
    owner: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    async with owner.put("/api/sandboxes/bob-box", json={}) as answer:
        assert answer.status == 200
    made = await _create(owner, prefix="alice-")
    headers = {"authorization": f"Bearer {made['key']}"}
    async with stranger.put("/api/sandboxes/alice-box", json={}, headers=headers) as answer:
        assert answer.status == 200
    for method, path in (
        ("PUT", "/api/sandboxes/bob-box"),
        ("GET", "/api/sandboxes/bob-box"),
        ("DELETE", "/api/sandboxes/bob-box"),
        ("POST", "/api/sandboxes/bob-box/wake"),
    ):
        async with stranger.request(method, path, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "forbidden")
    _, listed, _ = await _get(stranger, headers["authorization"])
    assert [one["id"] for one in listed["sandboxes"]] == ["alice-box"]


async def test_only_administrators_see_to_keys(
    owner: aiohttp.ClientSession, stranger: aiohttp.ClientSession
) -> None:
    plain, admin = await _create(owner), await _create(owner, admin=True)
    for path in ("/api/keys", "/metrics", "/api/metrics"):
        assert (await _get(stranger, f"Bearer {plain['key']}", path))[0] == 403
    status, listed, _ = await _get(stranger, f"Bearer {admin['key']}", "/api/keys")
    assert status == 200
    assert [(one["id"], one["admin"]) for one in listed["keys"]] == [
        (plain["id"], False),
        (admin["id"], True),
    ]


async def test_no_secret_is_kept_or_listed(
    guarded: RunningServer, owner: aiohttp.ClientSession, tmp_path: Path
) -> None:
    made = await _create(owner, prefix="a", name="zoë's")
    secret = made["key"].split("_")[2]
    assert secret not in await (await owner.get("/api/keys")).text()
    home = tmp_path / "home"
    kept = [file for file in home.iterdir() if file.is_file()]
    assert home / "keys.db" in kept
    assert not [file for file in kept if secret.encode() in file.read_bytes()]
    assert os.stat(home / "keys.db").st_mode & 0o077 == 0


async def test_keys_and_their_last_use_outlive_the_server(tmp_path: Path) -> None:
    async with run_server(_settings(tmp_path)) as server, _at(server) as by_socket:
        made = await _create(by_socket)
        assert made["last_used_at"] is None
        async with aiohttp.ClientSession(server.url) as session:
            await _get(session, f"Bearer {made['key']}")
    async with run_server(_settings(tmp_path)) as server, _at(server) as by_socket:
        (listed,) = (await (await by_socket.get("/api/keys")).json())["keys"]
        assert abs(listed["last_used_at"] - time.time()) < 60
        async with aiohttp.ClientSession(server.url) as session:
            assert (await _get(session, f"Bearer {made['key']}"))[0] == 200


async def test_the_last_use_is_written_at_most_once_a_minute(
    guarded: RunningServer,
    owner: aiohttp.ClientSession,
    stranger: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    made = await _create(owner)
    file = sqlite3.connect(tmp_path / "home" / "keys.db")
    try:
        await _get(stranger, f"Bearer {made['key']}")
        deadline = time.monotonic() + 5
        while (first := _used(file)) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await _get(stranger, f"Bearer {made['key']}")
        (listed,) = (await (await owner.get("/api/keys")).json())["keys"]
        assert listed["last_used_at"] > first
        assert _used(file) == first
    finally:
        file.close()


async def test_a_key_that_makes_no_sense_is_not_made(owner: aiohttp.ClientSession) -> None:
    for asked in (
        {"name": ""},
        {"name": "x" * 129},
        {"name": "a\nb"},
        {"name": "x", "prefix": "-a"},
        {"name": "x", "prefix": "A"},
        {"name": "x", "prefix": "xn--a"},
        {"name": "x", "prefix": "a" * 48},
        {"name": "x", "prefix": "a", "admin": True},
        {"name": "x", "expires_in": 0},
        {"name": "x", "expires_in": -1},
    ):
        answer = await owner.post("/api/keys", json=asked)
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_option")


async def test_a_loopback_server_without_keys_is_its_users_own(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
        assert (await _get(session, None, "/api/keys"))[0] == 200
        assert not os.path.exists(tmp_path / "home" / "keys.db")


def test_a_server_for_others_wants_keys_unless_told_otherwise() -> None:
    assert ServerSettings(home="h", host="0.0.0.0").needs_keys
    assert not ServerSettings(home="h", host="0.0.0.0", keys=False).needs_keys
    assert not ServerSettings(home="h", host="::1").needs_keys
    assert not ServerSettings(home="h").needs_keys


def _at(server: RunningServer) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(server.socket)
    return aiohttp.ClientSession("http://localhost", connector=connector)


def _used(file: sqlite3.Connection) -> float | None:
    (used,) = file.execute("SELECT last_used_at FROM keys").fetchone()
    return float(used) if used is not None else None
