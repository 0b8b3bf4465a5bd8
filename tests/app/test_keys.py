"""Access to an app: keys of the state directory, their scopes, ceilings and end, and peers."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from app.site import ECHO, Site, project
from smokebox.app.app import App
from smokebox.app.server import run_app
from smokebox.client.agent_client import AgentClient
from smokebox.errors import InvalidOption, Unauthorized
from smokebox.tenancy.keys import Keys
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROFILES = """
[profiles.small]
rate = 0.01
[profiles.one]
concurrency = 1
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A served app, and the keys of its user."""

    site: Site
    keys: Keys

    async def key(self, **options: Any) -> dict[str, str]:
        """Create a key, and return the header that has it."""
        created = await self.keys.create(CreateKey(name="key", **options))
        return {"authorization": f"Bearer {created.key}"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "server.toml").write_text(PROFILES)
    monkeypatch.setenv("SMOKEBOX_HOME", str(home))
    return home


@contextlib.asynccontextmanager
async def serve(folder: Path, **options: Any) -> AsyncIterator[Site]:
    async with run_app(App(folder), **options) as url, aiohttp.ClientSession() as http:
        yield Site(url, http)


@pytest_asyncio.fixture
async def served(home: Path, folder: Path) -> AsyncIterator[Served]:
    async with serve(folder, keys=True) as site:
        profiles = App(folder)._profiles
        async with Keys(str(home), profiles) as keys:
            yield Served(site, keys)


async def test_key_made_while_the_app_runs_is_accepted(served: Served) -> None:
    missing = await served.site.get("/agents")
    assert missing.body["error"]["message"].endswith("none has been created yet.")
    assert missing.headers["www-authenticate"] == "Bearer"
    headers = await served.key(admin=True)
    assert (await served.site.get("/agents", headers=headers)).status == 200


async def test_tenant_sees_only_ids_with_its_prefix(served: Served) -> None:
    first, second, all = [await served.key(prefix=one) for one in ("a", "b", "")]
    for headers, id in ((first, "a-1"), (second, "b-1")):
        sent = await served.site.send(f"echo/{id}?wait=result", "x", headers=headers)
        assert sent.status == 200
        run = await served.site.post("/workflows/add?wait=result", [1], headers=headers)
        assert run.body["id"].startswith(id[:2])
    for headers, prefixes in ((first, {"a-"}), (second, {"b-"}), (all, {"a-", "b-"})):
        for path, name in (("/agents/echo", "conversations"), ("/workflows/add", "runs")):
            found = (await served.site.get(path, headers=headers)).body[name]
            assert {one["id"][:2] for one in found} == prefixes


async def test_same_idempotency_key_of_two_tenants_is_two_runs(served: Served) -> None:
    ids = []
    for prefix in ("a", "b"):
        headers = {**await served.key(prefix=prefix), "Idempotency-Key": "same"}
        runs = [await served.site.post("/workflows/add", [1], headers=headers) for _ in range(2)]
        assert runs[0].body == runs[1].body
        ids.append(runs[0].body["id"])
    assert ids[0] != ids[1]


async def test_index_lists_what_the_scopes_read(served: Served) -> None:
    headers = await served.key(scopes=["agents:read"])
    found = (await served.site.get("/agents", headers=headers)).body
    assert (len(found["agents"]), found["workflows"]) == (1, [])
    assert (await served.site.get("/workflows", headers=headers)).status == 403


async def test_rate_and_concurrency_of_the_profile_apply(served: Served) -> None:
    small = await served.key(profile="small", prefix="s")
    assert (await served.site.get("/agents", headers=small)).status == 200
    late = await served.site.get("/agents", headers=small)
    assert (late.status, late.body["error"]["fields"]["ceiling"]) == (429, "rate")
    assert "[profiles.small]" in late.body["error"]["hint"]
    assert int(late.headers["retry-after"]) >= 1
    one = await served.key(profile="one", prefix="o")
    sent = await served.site.send("echo/o-1", "wait go", headers=one)
    events = {**one, "accept": "text/event-stream"}
    async with served.site.http.get(f"{served.site.url}/agents/echo/o-1", headers=events):
        second = await served.site.get("/agents", headers=one)
        assert (second.status, second.body["error"]["fields"]["ceiling"]) == (429, "concurrency")
    async with asyncio.timeout(10):
        while (await served.site.post("/agents/echo/o-1/abort", headers=one)).status != 200:
            await asyncio.sleep(0.01)
        work = f"/submissions/{sent.body['submission_id']}?wait=20"
        assert (await served.site.get(work, headers=one)).body["outcome"] == "aborted"


async def test_key_whose_profile_is_not_configured_is_refused(home: Path, folder: Path) -> None:
    async with serve(folder, keys=True) as site:
        (home / "server.toml").write_text(PROFILES + "[profiles.late]\nrate = 9\n")
        async with Keys(str(home), App(folder)._profiles) as keys:
            created = await keys.create(CreateKey(name="late", profile="late"))
        headers = {"authorization": f"Bearer {created.key}"}
        refused = await site.get("/agents", headers=headers)
        assert (refused.status, refused.body["error"]["fields"]["reason"]) == (403, "profile")


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_stream_ends_when_its_key_does(served: Served, end: str) -> None:
    lasting = await served.key(admin=True)
    await served.site.send("echo/one", "wait never", headers=lasting)
    url = f"{served.site.url}/agents/echo/one"
    created = await served.keys.create(
        CreateKey(name="short", expires_in=3.0 if end == "expired" else None)
    )
    headers = {"authorization": f"Bearer {created.key}", "accept": "text/event-stream"}
    async with (
        served.site.http.get(url, headers=headers) as stream,
        served.site.http.get(url, headers={**headers, **lasting}) as other,
    ):
        assert b"session_created" in await stream.content.readuntil(b"\n\n")
        if end == "revoked":
            command = [sys.executable, "-m", "smokebox", "keys", "revoke", created.id]
            await asyncio.to_thread(subprocess.run, command, check=True)
        async with asyncio.timeout(10):
            rest = await stream.content.read()
        last = rest.split(b"event: ")[-1]
        assert last.startswith(b"error\n") and f'"reason":"{end}"'.encode() in last
        assert not other.content.at_eof()
    refused = await served.site.get("/agents", headers=headers)
    assert refused.status == 401
    await served.site.post("/agents/echo/one/abort", headers=lasting)


async def test_sdk_raises_the_error_of_a_stream_whose_key_ends(served: Served) -> None:
    created = await served.keys.create(CreateKey(name="short"))
    client = AgentClient(served.site.url, key=created.key)
    sent = await client.send("echo", "one", "wait never")
    revoked = False
    with pytest.raises(Unauthorized, match="the key of this request was revoked"):
        async with asyncio.timeout(10):
            async for _ in sent.events():
                if not revoked:
                    revoked = True
                    await served.keys.revoke(created.id)
    lasting = await served.key(admin=True)
    await served.site.post("/agents/echo/one/abort", headers=lasting)


async def test_waiting_request_is_refused_when_its_key_expires(served: Served) -> None:
    headers = await served.key(expires_in=2.0)
    async with asyncio.timeout(10):
        done = await served.site.send("echo/one?wait=result", "wait never", headers=headers)
    assert (done.status, done.body["error"]["fields"]["reason"]) == (401, "expired")
    assert 'error="invalid_token"' in done.headers["www-authenticate"]
    lasting = await served.key(admin=True)
    aborted = await served.site.post("/agents/echo/one/abort", headers=lasting)
    assert len(aborted.body["aborted"]) == 1


async def test_keys_of_the_environment_are_operators_beside_those_of_the_store(
    home: Path, folder: Path
) -> None:
    (folder / ".env").write_text("SMOKEBOX_APP_KEYS=one,two\n")
    async with serve(folder) as site, Keys(str(home)) as keys:
        tenant = (await keys.create(CreateKey(name="t", prefix="t"))).key
        for key, status in (("one", 200), ("two", 200), (tenant, 403), ("three", 401), ("", 401)):
            headers = {"authorization": f"Bearer {key}"}
            found = await site.get("/agents/echo/any", headers=headers)
            assert found.status == status, key


async def test_other_addresses_require_a_key_unless_told_otherwise(
    home: Path, folder: Path
) -> None:
    for keys, status in ((None, 401), (True, 401), (False, 200)):
        async with serve(folder, host="0.0.0.0", keys=keys) as site:
            url = site.url.replace("0.0.0.0", "127.0.0.1")
            async with site.http.get(f"{url}/agents") as response:
                assert response.status == status


async def test_loopback_serves_its_own_user_without_a_key(home: Path, folder: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        async with serve(folder, host=host) as site:
            assert (await site.get("/agents")).status == 200


async def test_mounted_app_leaves_the_check_to_its_owner(home: Path, folder: Path) -> None:
    from app.site import serve as serve_mounted

    async with serve_mounted(folder) as site:
        headers = {"authorization": "Bearer of another kind"}
        assert (await site.get("/agents", headers=headers)).status == 200


@pytest.mark.parametrize("line", ["trusted_proxies = 1", "head_timeout = 0", "max_connections = 0"])
def test_invalid_limits_are_refused(home: Path, folder: Path, line: str) -> None:
    (folder / "smokebox.toml").write_text(f"[app]\n{line}\n")
    with pytest.raises(InvalidOption, match=line.split()[0]):
        App(folder)


def test_invalid_profile_keeps_the_app_from_starting(home: Path, tmp_path: Path) -> None:
    (home / "server.toml").write_text("[profiles.x]\nnone = 1\n")
    with pytest.raises(InvalidOption, match=r"profiles\.x"):
        App(project(tmp_path / "p", agents__echo=ECHO))
