"""API keys over HTTP: authentication, scopes and storage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from smokebox.errors import PathError
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.keys import Keys
from smokebox.wire.requests import CreateKey
from smokebox.wire.responses import NewKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture
async def keyed_server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server that requires keys over TCP."""
    async with run_server(_settings(tmp_path)) as server:
        yield server


@pytest_asyncio.fixture
async def local(keyed_server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of its unix socket, which needs no key."""
    connector = aiohttp.UnixConnector(keyed_server.socket)
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        yield session


@pytest_asyncio.fixture
async def remote(keyed_server: RunningServer) -> AsyncIterator[aiohttp.ClientSession]:
    """A client over TCP, without a key."""
    async with aiohttp.ClientSession(keyed_server.url) as session:
        yield session


def _settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)


async def _create(local: aiohttp.ClientSession, **options: object) -> dict[str, Any]:
    response = await local.post("/api/keys", json={"name": "test", **options})
    assert response.status == 201
    created: dict[str, Any] = await response.json()
    return created


async def _get(
    session: aiohttp.ClientSession, authorization: str | None, path: str = "/api/sandboxes"
) -> tuple[int, dict[str, Any], str | None]:
    headers = {} if authorization is None else {"authorization": authorization}
    async with session.get(path, headers=headers) as response:
        return response.status, await response.json(), response.headers.get("www-authenticate")


async def test_error_of_a_server_without_keys_explains_how_to_create_one(
    remote: aiohttp.ClientSession,
) -> None:
    status, body, challenge = await _get(remote, None)
    assert (status, body["error"]["code"], challenge) == (401, "unauthorized", "Bearer")
    assert "smokebox keys create" in body["error"]["hint"]


async def test_bearer_scheme_is_case_insensitive(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    key = (await _create(local))["key"]
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert (await _get(remote, f"{scheme} {key}"))[0] == 200


async def test_invalid_keys_are_refused(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    key = (await _create(local))["key"]
    other = key[:-1] + ("0" if key[-1] != "0" else "1")
    unknown = key.replace(key.split("_")[1], "0" * 12)
    for authorization in (
        f"Bearer {other}",
        f"Bearer {unknown}",
        "Bearer",
        "Bearer x",
        f"Basic {key}",
        "",
    ):
        status, body, challenge = await _get(remote, authorization)
        assert (status, body["error"]["code"]) == (401, "unauthorized"), authorization
        assert challenge == 'Bearer error="invalid_token"'
        assert key.split("_")[2] not in str(body)


async def test_expired_key_is_refused(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    created = await _create(local, expires_in=0.05)
    deadline = time.monotonic() + 5
    while (response := await _get(remote, f"Bearer {created['key']}"))[0] == 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert response[0] == 401
    assert response[1]["error"]["message"] == f"the key {created['id']} has expired."


async def test_websocket_key_may_be_in_the_query(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    key = (await _create(local))["key"]
    path = "/api/sandboxes/ghost/terminals/t"
    for session, query, status in (
        (remote, "", 401),
        (remote, "?authorization=Bearer%20sbx_0_0", 401),
        (remote, f"?authorization=Bearer%20{key}", 404),
        (local, f"?authorization=Bearer%20{key}", 404),
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(path + query)
        assert caught.value.status == status
    # Not for other requests: proxies log their URLs.
    assert (await _get(remote, None, f"/api/sandboxes?authorization=Bearer%20{key}"))[0] == 401


async def test_revoked_key_is_refused_at_once(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    created = await _create(local)
    assert (await local.delete(f"/api/keys/{created['id']}")).status == 204
    assert (await _get(remote, f"Bearer {created['key']}"))[0] == 401
    async with local.delete(f"/api/keys/{created['id']}") as response:
        assert response.status == 404
    assert await (await local.get("/api/keys")).json() == {"keys": []}


async def test_revoking_a_key_ends_what_runs_with_it(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    async with local.put("/api/sandboxes/box", json={}) as response:
        assert response.status == 200
    first, second = await _create(local, admin=True), await _create(local)
    headers = [{"authorization": f"Bearer {one['key']}"} for one in (first, second)]
    box, command = "/api/sandboxes/box", {"command": "echo hi; sleep 60"}
    terminal = await remote.ws_connect(f"{box}/terminal", headers=headers[0])
    streams = [
        await remote.post(f"{box}/exec/stream", json=command, headers=one) for one in headers
    ]
    for stream in streams:
        assert b"hi" in await stream.content.readuntil(b"\n\n")
    waiting = asyncio.create_task(_exec(remote, f"{box}/exec", command, headers[0]))
    await asyncio.sleep(0.1)
    # The request that revokes its own key ends as usual.
    revoked = await remote.delete(f"/api/keys/{first['id']}", headers=headers[0])
    assert revoked.status == 204
    async with asyncio.timeout(5):
        while (message := await terminal.receive()).type in (
            aiohttp.WSMsgType.BINARY,
            aiohttp.WSMsgType.TEXT,
        ):
            pass
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1008)
        assert message.extra == "the key of this request was revoked."
        assert b"was revoked" in await streams[0].content.read()
        assert (await waiting)[0] == 401
    await asyncio.sleep(0.1)
    assert not streams[1].content.at_eof()
    streams[1].close()


async def test_key_that_expires_ends_what_runs_with_it(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    async with local.put("/api/sandboxes/box", json={}) as response:
        assert response.status == 200
    box, command = "/api/sandboxes/box", {"command": "echo hi; sleep 60"}
    lasting = {"authorization": f"Bearer {(await _create(local))['key']}"}
    other = await remote.post(f"{box}/exec/stream", json=command, headers=lasting)
    created = await _create(local, expires_in=4.0)
    headers = {"authorization": f"Bearer {created['key']}"}
    terminal = await remote.ws_connect(f"{box}/terminal", headers=headers)
    stream = await remote.post(f"{box}/exec/stream", json=command, headers=headers)
    waiting = asyncio.create_task(_exec(remote, f"{box}/exec", command, headers))
    async with asyncio.timeout(10):
        rest = await stream.content.read()
        # Not before its time, and then at once.
        assert 0 <= time.time() - created["expires_at"] < 3
        assert b"hi" in rest and b"the key of this request has expired." in rest
        while (message := await terminal.receive()).type != aiohttp.WSMsgType.CLOSE:
            pass
        assert (message.data, message.extra) == (1008, "the key of this request has expired.")
        status, body = await waiting
    assert (status, body["error"]["fields"]["reason"]) == (401, "expired")
    assert not other.content.at_eof()
    other.close()


async def test_key_revoked_by_another_process_is_refused_at_once(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession, tmp_path: Path
) -> None:
    created = await _create(local)
    [file] = tmp_path.rglob("keys.db")
    async with Keys(str(file.parent)) as keys:
        made = await keys.create(CreateKey(name="other"))
        for key in (created["key"], made.key):
            assert (await _get(remote, f"Bearer {key}"))[0] == 200
        await keys.revoke(created["id"])
        assert (await _get(remote, f"Bearer {created['key']}"))[0] == 401
    listed = await (await local.get("/api/keys")).json()
    assert [one["id"] for one in listed["keys"]] == [made.id]
    # Another file under the name: a backup that was restored.
    file.rename(file.with_name("old.db"))
    assert (await _get(remote, f"Bearer {made.key}"))[0] == 401
    file.with_name("old.db").rename(file)
    assert (await _get(remote, f"Bearer {made.key}"))[0] == 200


async def test_prefixes_of_two_processes_do_not_overlap(tmp_path: Path) -> None:
    async with Keys(str(tmp_path)) as one, Keys(str(tmp_path)) as two:
        made = [
            keys.create(CreateKey(name="x", prefix=prefix))
            for keys in (one, two)
            for prefix in ("a", "a-b")
        ]
        results = await asyncio.gather(*made, return_exceptions=True)
        assert len({one.prefix for one in results if isinstance(one, NewKey)}) == 1
        assert [one.id for one in one.all()] == [one.id for one in two.all()]


async def _exec(
    session: aiohttp.ClientSession, path: str, body: dict[str, str], headers: dict[str, str]
) -> tuple[int, Any]:
    async with session.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_key_with_a_prefix_is_limited_to_its_sandboxes(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    async with local.put("/api/sandboxes/bob-box", json={}) as response:
        assert response.status == 200
    created = await _create(local, prefix="alice-")
    headers = {"authorization": f"Bearer {created['key']}"}
    async with remote.put("/api/sandboxes/alice-box", json={}, headers=headers) as response:
        assert response.status == 200
    for method, path in (
        ("PUT", "/api/sandboxes/bob-box"),
        ("GET", "/api/sandboxes/bob-box"),
        ("DELETE", "/api/sandboxes/bob-box"),
        ("POST", "/api/sandboxes/bob-box/wake"),
    ):
        async with remote.request(method, path, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (403, "forbidden")
    _, listed, _ = await _get(remote, headers["authorization"])
    assert [sandbox["id"] for sandbox in listed["sandboxes"]] == ["alice-box"]


async def test_keys_and_metrics_need_an_administrator(
    local: aiohttp.ClientSession, remote: aiohttp.ClientSession
) -> None:
    plain, admin = await _create(local), await _create(local, admin=True)
    for path in ("/api/keys", "/metrics", "/api/metrics"):
        assert (await _get(remote, f"Bearer {plain['key']}", path))[0] == 403
    status, listed, _ = await _get(remote, f"Bearer {admin['key']}", "/api/keys")
    assert status == 200
    assert [(key["id"], key["admin"]) for key in listed["keys"]] == [
        (plain["id"], False),
        (admin["id"], True),
    ]


async def test_secrets_are_neither_stored_nor_listed(
    keyed_server: RunningServer, local: aiohttp.ClientSession, tmp_path: Path
) -> None:
    created = await _create(local, prefix="a", name="zoë's")
    secret = created["key"].split("_")[2]
    assert secret not in await (await local.get("/api/keys")).text()
    home = tmp_path / "home"
    stored = [file for file in home.iterdir() if file.is_file()]
    assert home / "keys.db" in stored
    assert not [file for file in stored if secret.encode() in file.read_bytes()]
    assert os.stat(home / "keys.db").st_mode & 0o077 == 0


async def test_keys_and_their_last_use_survive_a_restart(tmp_path: Path) -> None:
    async with run_server(_settings(tmp_path)) as server, _by_socket(server) as by_socket:
        created = await _create(by_socket)
        assert created["last_used_at"] is None
        async with aiohttp.ClientSession(server.url) as session:
            await _get(session, f"Bearer {created['key']}")
    async with run_server(_settings(tmp_path)) as server, _by_socket(server) as by_socket:
        (listed,) = (await (await by_socket.get("/api/keys")).json())["keys"]
        assert abs(listed["last_used_at"] - time.time()) < 60
        async with aiohttp.ClientSession(server.url) as session:
            assert (await _get(session, f"Bearer {created['key']}"))[0] == 200


async def test_key_file_without_an_application_id_is_opened(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    secret = "ab" * 32
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / "keys.db")) as file, file:
        file.execute(
            "CREATE TABLE keys (id TEXT PRIMARY KEY, name TEXT NOT NULL, hash BLOB NOT NULL, "
            "prefix TEXT NOT NULL, admin INTEGER NOT NULL, created_at REAL NOT NULL, "
            "expires_at REAL, last_used_at REAL)"
        )
        file.execute(
            "INSERT INTO keys VALUES ('0123456789ab', 'old', ?, '', 1, 5.0, NULL, NULL)",
            (sha256(secret.encode()).digest(),),
        )
    for _ in range(2):
        settings = _settings(tmp_path)
        async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
            authorization = f"Bearer sbx_0123456789ab_{secret}"
            status, listed, _ = await _get(session, authorization, "/api/keys")
        assert (status, [key["name"] for key in listed["keys"]]) == (200, ["old"])


async def test_damaged_key_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "keys.db").write_bytes(b"not a database" * 100)
    with pytest.raises(PathError, match=r"key store .*keys\.db is not usable.*Restore it"):
        async with run_server(_settings(tmp_path)):
            pass


async def test_last_use_is_stored_at_most_once_a_minute(
    keyed_server: RunningServer,
    local: aiohttp.ClientSession,
    remote: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    created = await _create(local)
    file = sqlite3.connect(tmp_path / "home" / "keys.db")
    try:
        await _get(remote, f"Bearer {created['key']}")
        deadline = time.monotonic() + 5
        while (first := _last_use(file)) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await _get(remote, f"Bearer {created['key']}")
        (listed,) = (await (await local.get("/api/keys")).json())["keys"]
        assert listed["last_used_at"] > first
        assert _last_use(file) == first
    finally:
        file.close()


async def test_invalid_options_of_a_key_are_refused(local: aiohttp.ClientSession) -> None:
    for options in (
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
        {"name": "x", "profile": "none"},
        {"name": "x", "profile": "default", "admin": True},
        {"name": "x", "scopes": ["sandboxes:read"], "admin": True},
        {"name": "x", "scopes": ["sandboxes:rea"]},
        {"name": "x", "scopes": []},
    ):
        response = await local.post("/api/keys", json=options)
        assert (response.status, (await response.json())["error"]["code"]) == (
            400,
            "invalid_option",
        )


async def test_loopback_server_needs_no_keys_by_default(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
        assert (await _get(session, None, "/api/keys"))[0] == 200
        assert not os.path.exists(tmp_path / "home" / "keys.db")


def test_server_on_other_addresses_needs_keys_by_default() -> None:
    assert ServerSettings(home="h", host="0.0.0.0").needs_keys
    assert not ServerSettings(home="h", host="0.0.0.0", keys=False).needs_keys
    assert not ServerSettings(home="h", host="::1").needs_keys
    assert not ServerSettings(home="h").needs_keys


def _by_socket(server: RunningServer) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(server.socket)
    return aiohttp.ClientSession("http://localhost", connector=connector)


def _last_use(file: sqlite3.Connection) -> float | None:
    (used,) = file.execute("SELECT last_used_at FROM keys").fetchone()
    return float(used) if used is not None else None
