"""A tenant's key, other users, web pages and odd clients against every route of an app.

The requests are generated from the table of routes, so that a new route is attacked too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from app.site import project
from http_response import fetch
from smokebox.app.app import App
from smokebox.app.asgi import ENDPOINTS
from smokebox.app.server import run_app
from smokebox.tenancy.keys import Keys
from smokebox.tenancy.scopes import SCOPES
from smokebox.wire.requests import CreateKey
from unprivileged import as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from attack.sandbox_code import Canary
    from http_response import HttpResponse
    from smokebox.app.endpoint import AppEndpoint

SECRET = "a5d0-the-secret-of-the-victim"
PART = re.compile(r"\{(\w+)\}")
PUBLIC = {("GET", "/health")}
PROTECTED = [one for one in ENDPOINTS if (one.method, one.path) not in PUBLIC]
# The names of the victim's things are in every route that needs one.
AGENT, WORKFLOW, CHAT = "pusher", "add", "victim-chat"
PUSHER = """
from smokebox import create_agent
from smokebox.agents.approval import Approval
from smokebox.testing import ScriptedModel, call

model = ScriptedModel(then=lambda request: call("bash", command="echo pushed"))
agent = create_agent(model=model, approval=Approval(ask=["bash"]))
"""
# At the end of a test the app does not wait for the call that was not approved.
SETTINGS = "[app]\ngrace = 0.01\n"
ADD = "async def run(ctx):\n    return ctx.payload\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """An app with a conversation, a run and a waiting approval of a victim, and more keys."""

    app: App
    url: str
    keys: Keys
    victim: dict[str, str]
    parts: dict[str, str]

    async def key(self, **options: Any) -> dict[str, str]:
        """Create a key, and return the header that has it."""
        created = await self.keys.create(CreateKey(name="key", **options))
        return {"authorization": f"Bearer {created.key}"}

    async def send(self, method: str, path: str, headers: dict[str, str], **options: Any) -> Any:
        """Send a request, and return its status and text."""
        options.setdefault("json", {})
        async with (
            aiohttp.ClientSession(self.url, headers=headers) as session,
            session.request(method, path, **options) as response,
        ):
            return response.status, await response.text()

    async def get(self, path: str) -> HttpResponse:
        """Send a request of the victim."""
        async with aiohttp.ClientSession(self.url, headers=self.victim) as session:
            return await fetch(session.get(path))

    async def check_unharmed(self) -> None:
        """Assert that the victim has everything it had, and that its call waits on."""
        [chat] = (await self.get(f"/agents/{AGENT}")).body["conversations"]
        assert (chat["id"], chat["working"]) == (CHAT, True)
        [run] = (await self.get(f"/workflows/{WORKFLOW}")).body["runs"]
        assert (run["id"], run["result"]) == (self.parts["run"], SECRET)
        kinds = [one["type"] for one in (await self.get(f"/agents/{AGENT}/{CHAT}")).body["events"]]
        assert kinds.count("message_added") == 1
        assert "approval_requested" in kinds
        assert not {"approval_decided", "tool_ended", "work_ended"} & set(kinds)


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Serve an app that requires keys, with what a victim has there."""
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path / "home"))
    folder = project(tmp_path / "p", agents__pusher=PUSHER, workflows__add=ADD)
    (folder / "smokebox.toml").write_text(SETTINGS)
    app = App(folder)
    async with (
        Keys(str(tmp_path / "home")) as keys,
        run_app(app, keys=True) as url,
    ):
        created = await keys.create(CreateKey(name="victim", prefix="victim"))
        victim = {"authorization": f"Bearer {created.key}"}
        parts = await create_objects(url, victim)
        yield World(app=app, url=url, keys=keys, victim=victim, parts=parts)


async def create_objects(url: str, victim: dict[str, str]) -> dict[str, str]:
    """Create what the victim has; return its names."""
    async with aiohttp.ClientSession(url, headers=victim) as http:
        path = f"/agents/{AGENT}/{CHAT}"
        sent = (await fetch(http.post(path, json={"message": SECRET}))).body
        run = (await fetch(http.post(f"/workflows/{WORKFLOW}?wait=result", json=SECRET))).body
        assert run["id"].startswith("victim-")
        while True:
            events = (await fetch(http.get(path))).body["events"]
            for event in events:
                if event["type"] == "approval_requested":
                    return {
                        "call_id": event["call_id"],
                        "submission": sent["submission_id"],
                        "run_submission": run["submission_id"],
                        "run": run["id"],
                    }
            await asyncio.sleep(0.01)


def fill(endpoint: AppEndpoint, parts: dict[str, str], **names: str) -> str:
    """Return a path with values for its parameters. Fails for a parameter without a value."""
    run = not endpoint.path.startswith("/agents")
    known = {
        **parts,
        "name": WORKFLOW if run else AGENT,
        "id": parts["run"] if run else CHAT,
        **names,
    }
    return PART.sub(lambda part: known[part[1]], endpoint.path)


def body_of(endpoint: AppEndpoint) -> object:
    """Return a body that most routes accept."""
    return {"allow": True} if "approvals" in endpoint.path else {"message": "attack"}


def test_only_health_is_public() -> None:
    assert {(one.method, one.path) for one in ENDPOINTS if not one.scopes} == PUBLIC
    assert all(one.id_kind for one in ENDPOINTS if "{id}" in one.path)


def expected_statuses(endpoint: AppEndpoint) -> tuple[int, ...]:
    """Return the statuses for a request of another tenant about the victim's things."""
    if endpoint.id_kind:
        return (403,)
    # Those without a name in their path list the sender's own, or create something.
    return (404,) if "{submission}" in endpoint.path else (200, 202)


async def test_no_route_serves_another_tenant(world: World) -> None:
    attacker = await world.key(prefix="attacker")
    failed: list[object] = []
    for endpoint in PROTECTED:
        for submission in (world.parts["submission"], world.parts["run_submission"]):
            path = fill(endpoint, world.parts, submission=submission)
            body = body_of(endpoint)
            status, text = await world.send(endpoint.method, path, attacker, json=body)
            if status not in expected_statuses(endpoint) or SECRET in text:
                failed.append((endpoint.method, path, status, text))
            if status < 300 and "victim-" in text:
                failed.append((endpoint.method, path, text))
    assert failed == []
    await world.check_unharmed()


async def test_own_conversation_does_not_reach_work_of_another_tenant(world: World) -> None:
    attacker = await world.key(prefix="attacker")
    own = f"/agents/{AGENT}/attacker-chat"
    assert (await world.send("POST", own, attacker, json={"message": "x"}))[0] == 202
    texts = []
    for id in (world.parts["submission"], world.parts["run_submission"], "0" * 32):
        path = f"{own}/abort"
        status, text = await world.send("POST", path, attacker, json={"submission_id": id})
        texts.append((status, text.replace(id, "ID")))
    assert texts[0][0] == 404
    assert texts[0] == texts[1] == texts[2]
    call = f"{own}/approvals/{world.parts['call_id']}"
    assert (await world.send("POST", call, attacker, json={"allow": True}))[0] in (200, 404)
    key = {**attacker, "idempotency-key": "k"}
    first = json.loads((await world.send("POST", f"/workflows/{WORKFLOW}", key, json=1))[1])
    assert first["id"].startswith("attacker-")
    await world.check_unharmed()


async def test_no_route_tells_what_exists(world: World) -> None:
    attacker = await world.key(prefix="attacker")
    different: list[object] = []
    nothing = {"id": "victim-none", "submission": "0" * 32, "call_id": "none"}
    for endpoint in PROTECTED:
        if not nothing.keys() & set(PART.findall(endpoint.path)):
            continue
        found = []
        for names in ({}, nothing):
            path = fill(endpoint, world.parts, **names)
            status, text = await world.send(endpoint.method, path, attacker, json=body_of(endpoint))
            for part in (CHAT, *world.parts.values(), *nothing.values()):
                text = text.replace(part, "PART")
            found.append((status, text))
        if found[0] != found[1]:
            different.append((endpoint.path, found))
    assert different == []


async def test_every_route_needs_a_key(world: World) -> None:
    bogus = {"authorization": f"Bearer sbx_{'0' * 12}_{'0' * 64}"}
    failed: list[object] = []
    for headers in ({}, bogus, {"authorization": "Basic eDp5"}):
        for endpoint in PROTECTED:
            path = fill(endpoint, world.parts)
            status, text = await world.send(endpoint.method, path, headers)
            if status != 401 or "keys create" not in text or SECRET in text:
                failed.append((path, status, text))
    assert failed == []
    await world.check_unharmed()


async def test_every_route_needs_its_scope(world: World) -> None:
    failed: list[object] = []
    for endpoint in PROTECTED:
        others = [scope for scope in SCOPES if scope not in endpoint.scopes]
        key = await world.key(prefix="victim", scopes=others)
        path = fill(endpoint, world.parts)
        status, text = await world.send(endpoint.method, path, key, json=body_of(endpoint))
        if status != 403 or not any(scope in text for scope in endpoint.scopes):
            failed.append((path, status, text))
    assert failed == []
    await world.check_unharmed()


async def test_reading_key_changes_nothing(world: World) -> None:
    reads = [scope for scope in SCOPES if scope.endswith(":read")]
    reader = await world.key(prefix="victim", scopes=reads)
    failed: list[object] = []
    for endpoint in PROTECTED:
        path = fill(endpoint, world.parts)
        status, _ = await world.send(endpoint.method, path, reader, json=body_of(endpoint))
        if (status == 200) != (endpoint.method == "GET"):
            failed.append((endpoint.method, path, status))
    assert failed == []
    await world.check_unharmed()


async def test_no_route_reads_a_file_of_the_host(world: World, canary: Canary) -> None:
    attacker = await world.key(prefix="attacker")
    secret = canary.secret
    failed: list[object] = []
    bodies = (
        {"message": secret},
        {"message": "x", "attachments": [{"name": f"../..{secret}", "data": ""}]},
        {"message": "x", "attachments": [{"name": secret, "data": "AAAA"}]},
        {"submission_id": secret, "allow": True, "reason": secret},
    )
    quoted = f"..%2f..{secret.replace('/', '%2f')}"
    for endpoint in PROTECTED:
        for names in ({}, {"name": quoted, "id": quoted, "submission": quoted, "call_id": quoted}):
            path = fill(endpoint, {**world.parts, "id": "attacker-x"}, **names)
            for body in bodies:
                query = {"offset": secret, "limit": secret} if body is bodies[0] else {}
                status, text = await world.send(
                    endpoint.method, path, attacker, json=body, params=query
                )
                if canary.TEXT in text or status >= 500:
                    failed.append((endpoint.method, path, body, status, text))
    assert failed == []
    await world.check_unharmed()


@contextlib.asynccontextmanager
async def keyless(tmp_path: Path, **settings: object) -> AsyncIterator[str]:
    """Serve an app without keys on a loopback address."""
    folder = project(tmp_path / "p", agents__pusher=PUSHER, workflows__add=ADD)
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (folder / "smokebox.toml").write_text(f"{SETTINGS}{lines}")
    async with run_app(App(folder)) as url, asyncio.timeout(18):
        yield url


NAMES = {"submission": "0" * 32, "run": "none", "call_id": "none"}


@needs_root
async def test_other_users_of_the_machine_need_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path / "home"))
    async with keyless(tmp_path) as url, Keys(str(tmp_path / "home")) as keys:
        created = await keys.create(CreateKey(name="other", prefix="other"))
        status = ("-so/dev/null", "-w", "%{http_code}\\n")
        requests: list[str] = []
        for endpoint in PROTECTED:
            path = fill(endpoint, NAMES)
            requests += [*status, "-X", endpoint.method, f"{url}{path}", "--next"]
        process = await asyncio.create_subprocess_exec(
            *as_nobody(),
            *("curl", *requests, *status, "-H", f"Authorization: Bearer {created.key}"),
            f"{url}/agents",
            stdout=subprocess.PIPE,
        )
        found = (await process.communicate())[0].split()
        assert found == [b"401"] * len(PROTECTED) + [b"200"]
        async with aiohttp.ClientSession(url) as own:
            assert (await fetch(own.get("/agents"))).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": ""},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
    ids=str,
)
async def test_pages_of_other_sites_reach_no_route(tmp_path: Path, headers: dict[str, str]) -> None:
    failed: list[object] = []
    async with keyless(tmp_path) as url, aiohttp.ClientSession(url, headers=headers) as page:
        for endpoint in PROTECTED:
            path = fill(endpoint, NAMES)
            # What a form of a page can send.
            response = await fetch(page.request(endpoint.method, path, data=b'{"message": "x"}'))
            if (response.status, response.code) != (403, "forbidden"):
                failed.append((path, response))
    assert failed == []


async def test_long_and_deep_bodies_are_refused(tmp_path: Path) -> None:
    deep = b'{"message":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    nested = b"[" * 700 + b"]" * 700
    failed: list[object] = []
    async with keyless(tmp_path, max_body=300_000) as url, aiohttp.ClientSession(url) as http:
        for endpoint in PROTECTED:
            path, reads = fill(endpoint, NAMES), endpoint.method == "GET"
            for body in (b"x" * 300_001, deep, nested, b'{"message": "\xff"}', b"\x00"):
                async with http.request(endpoint.method, path, data=body) as got:
                    accepted = got.status < 300 and len(body) > 300_000 and not reads
                    if got.status >= 500 or accepted:
                        failed.append((endpoint.method, path, body[:20], got.status))
        assert (await fetch(http.get("/health"))).status == 200
    assert failed == []


async def raw(url: str, data: bytes, more: bytes = b"") -> bytes:
    """Send bytes, then `more` again and again; return what comes until the app closes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0.01)
            return await reading
        return b""
    finally:
        writer.transport.abort()


async def test_half_sent_and_endless_heads_are_closed(tmp_path: Path) -> None:
    head = b"GET /agents HTTP/1.1\r\nhost: localhost\r\n"
    async with keyless(tmp_path, head_timeout=0.3) as url:
        starts = (b"", b"G", head, head + b"x: ")
        responses = await asyncio.gather(*(raw(url, start) for start in starts * 10))
        assert {one.split()[1] for one in responses if one} == {b"408"}
        endless = await raw(url, head + b"x: ", b"y" * 65536)
        assert endless == b"" or b" 431 " in endless
        async with aiohttp.ClientSession(url) as http:
            assert (await fetch(http.get("/agents"))).status == 200


async def test_connections_of_an_address_are_limited(tmp_path: Path) -> None:
    async with keyless(tmp_path, address_connections=3) as url:
        port = int(url.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            await asyncio.sleep(0.05)
            refused = await raw(url, b"")
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"`address_connections` in [app] of smokebox.toml" in refused
        async with aiohttp.ClientSession(url) as http:
            while (await http.get("/health")).status != 200:
                await asyncio.sleep(0.01)


async def test_requests_of_a_client_behind_a_trusted_proxy_are_limited(tmp_path: Path) -> None:
    options = {"address_connections": 2, "trusted_proxies": ["127.0.0.1"]}
    async with keyless(tmp_path, **options) as url, aiohttp.ClientSession(url) as http:
        await (await http.post(f"/agents/{AGENT}/a", json={"message": "x"})).read()
        path, events = f"/agents/{AGENT}/a", {"accept": "text/event-stream"}
        hostile = {**events, "x-forwarded-for": "127.0.0.1, 192.0.2.1"}
        streams = [await http.get(path, headers=hostile) for _ in range(2)]
        assert [one.status for one in streams] == [200, 200]
        assert (await fetch(http.get(path, headers=hostile))).status == 429
        other = {"x-forwarded-for": "192.0.2.1, 192.0.2.2"}
        assert (await fetch(http.get(path, headers=other))).status == 200
        for one in streams:
            one.close()
