"""Egress over HTTP: policy, changes, access, handlers, log and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from http_response import fetch
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.handlers import Content, HandleFrame, SendFrame, ServeFrame, from_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SECONDS = 20.0
HANDLERS_ALLOWED = ("smokebox.egress.builtin_handlers:*", "smokebox.nowhere:*", "handlers_*")
EGRESS = "/api/sandboxes/box/egress"
HANDLERS = f"{EGRESS}/handlers"
IMPORTED = "smokebox.egress.builtin_handlers:log"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server whose operator allows some handlers."""
    settings = _settings(tmp_path)
    async with run_server(settings) as server:
        yield server


def _settings(tmp_path: Path, **more: Any) -> ServerSettings:
    home = str(tmp_path / "home")
    return ServerSettings(home=home, host="127.0.0.1", pool=0, handlers=HANDLERS_ALLOWED, **more)


@pytest_asyncio.fixture
async def api(http: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that has the sandbox `box`."""
    assert (await fetch(http.put("/api/sandboxes/box", json={}))).status == 200
    yield http


async def curl(http: aiohttp.ClientSession, url: str) -> str:
    command = f"curl -s -m 10 -w '\\n%{{http_code}}' {url}"
    result = await fetch(http.post("/api/sandboxes/box/exec", json={"command": command}))
    return str(result.body["stdout"])


async def in_force(http: aiohttp.ClientSession) -> dict[str, Any]:
    policy: dict[str, Any] = (await fetch(http.get(EGRESS))).body["in_force"]
    return policy


async def test_new_sandbox_has_no_network_access(api: aiohttp.ClientSession) -> None:
    info = (await fetch(api.get(EGRESS))).body
    assert info["settings"] == {}
    assert info["served"] == []
    assert info["in_force"]["internet"] is False
    assert info["in_force"]["allowed_hosts"] is None


async def test_policy_of_a_sandbox_is_replaced_by_a_later_one(
    api: aiohttp.ClientSession,
) -> None:
    policy = {"internet": True, "denied_hosts": ["evil.test"], "max_requests": 7}
    assert (await fetch(api.put("/api/sandboxes/box", json={"egress": policy}))).status == 200
    assert (await fetch(api.get(EGRESS))).body["settings"] == policy
    await fetch(api.put("/api/sandboxes/box", json={"labels": {"a": "b"}}))
    assert (await fetch(api.get(EGRESS))).body["settings"] == policy
    await fetch(api.put("/api/sandboxes/box", json={"egress": ["a.test"]}))
    assert (await fetch(api.get(EGRESS))).body["settings"] == {"allowed_hosts": ["a.test"]}


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"allowed_hosts": ["a.test"]}, 'Use {"egress": {"allowed_hosts": ...}}.'),
        ({"network": {}}, 'Use {"egress": {"allowed_hosts": ...}}.'),
        ({"egress": {"alowed_hosts": []}}, "Did you mean 'allowed_hosts'?"),
    ],
)
async def test_old_spelling_gets_an_error_that_names_the_new_one(
    api: aiohttp.ClientSession, body: dict[str, Any], hint: str
) -> None:
    response = await fetch(api.put("/api/sandboxes/box", json=body))
    assert (response.status, response.code) == (400, "invalid_option")
    assert response.body["error"]["hint"] == hint


async def test_put_replaces_the_settings_and_keeps_changes(
    api: aiohttp.ClientSession,
) -> None:
    await fetch(api.put("/api/sandboxes/box", json={"egress": {"internet": True}}))
    await fetch(api.post(f"{EGRESS}/changes", json={"allow": ["new.test"]}))
    response = await fetch(api.put(EGRESS, json={"denied_hosts": ["evil.test"]}))
    assert response.body["settings"] == {"denied_hosts": ["evil.test"]}
    assert response.body["in_force"]["opened_hosts"] == ["new.test"]
    response = await fetch(api.delete(f"{EGRESS}/changes"))
    assert response.body["in_force"]["opened_hosts"] == []


async def test_changes_are_atomic(api: aiohttp.ClientSession) -> None:
    invalid = {"allow": ["good.test"], "deny": ["https://bad"]}
    response = await fetch(api.post(f"{EGRESS}/changes", json=invalid))
    assert (response.status, response.code) == (400, "invalid_option")
    assert (await in_force(api))["opened_hosts"] == []
    valid = {
        "allow": ["a.test"],
        "deny": ["b.test"],
        "outbound_by_host": {"C.test.": "@client"},
        "outbound": IMPORTED,
        "internet": True,
    }
    assert (await fetch(api.post(f"{EGRESS}/changes", json=valid))).status == 200
    found = await in_force(api)
    assert found["opened_hosts"] == ["a.test"]
    assert found["denied_hosts"] == ["b.test"]
    assert found["outbound_by_host"] == {"c.test": "@client"}
    assert (found["outbound"], found["internet"]) == (IMPORTED, True)


@pytest.mark.parametrize(
    "body",
    [
        {"allowed_hosts": ["https://x"]},
        {"outbound": "not a path"},
        {"outbound": "smokebox.nowhere:nothing"},
        {"outbound_by_host": {"a.test": "smokebox.egress.builtin_handlers:bearer"}},
        {"outbound_by_host": {"": "@client"}},
        {"tcp": ["db.test:0"]},
        {"max_requests": 0},
        {"internet": "yes"},
        {"unknown": 1},
    ],
)
async def test_invalid_policies_are_refused(
    api: aiohttp.ClientSession, body: dict[str, Any]
) -> None:
    for url, content in (("/api/sandboxes/box", {"egress": body}), (EGRESS, body)):
        response = await fetch(api.put(url, json=content))
        assert (response.status, response.code) == (400, "invalid_option"), response
    assert (await fetch(api.get(EGRESS))).body["settings"] == {}


async def test_imported_handlers_need_an_administrator(tmp_path: Path) -> None:
    async with run_server(_settings(tmp_path, keys=True)) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as owner:
            key = (await fetch(owner.post("/api/keys", json={"name": "x"}))).body["key"]
            assert (
                await fetch(
                    owner.put("/api/sandboxes/box", json={"egress": {"outbound": IMPORTED}})
                )
            ).status == 200
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as tenant:
            for response in (
                await fetch(
                    tenant.put("/api/sandboxes/box", json={"egress": {"outbound": IMPORTED}})
                ),
                await fetch(tenant.post("/api/sandboxes", json={"egress": {"outbound": IMPORTED}})),
                await fetch(tenant.put(EGRESS, json={"outbound_by_host": {"a.test": IMPORTED}})),
                await fetch(tenant.post(f"{EGRESS}/changes", json={"outbound": IMPORTED})),
            ):
                assert (response.status, response.code) == (403, "forbidden")
                assert "administrators" in response.body["error"]["message"]
            allowed = await fetch(
                tenant.put("/api/sandboxes/box", json={"egress": {"outbound": "@client"}})
            )
            assert allowed.status == 200


@pytest.mark.parametrize(
    "handler",
    [
        "subprocess:Popen",
        "smokebox.egress.builtin_handlers:urlsplit",
        "smokebox.egress.builtin_handlers:re.sub",
        "handlersx:run",
    ],
)
async def test_handlers_that_the_operator_does_not_allow_are_refused_to_everybody(
    api: aiohttp.ClientSession, handler: str
) -> None:
    for response in (
        await fetch(api.put("/api/sandboxes/box", json={"egress": {"outbound": handler}})),
        await fetch(api.post("/api/sandboxes", json={"egress": {"outbound": handler}})),
        await fetch(api.put(EGRESS, json={"outbound_by_host": {"a.test": handler}})),
        await fetch(api.post(f"{EGRESS}/changes", json={"outbound": handler})),
    ):
        assert (response.status, response.code) == (403, "forbidden"), response
        assert "[handlers]" in response.body["error"]["hint"]
    assert (await fetch(api.get(EGRESS))).body["settings"] == {}


async def test_no_handler_may_be_named_without_a_list(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), pool=0)
    async with run_server(settings) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            body = {"egress": {"outbound": IMPORTED}}
            assert (await fetch(http.put("/api/sandboxes/box", json=body))).status == 403


async def test_imported_handler_runs_in_the_server(
    api: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"handlers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from smokebox.egress import Response\n"
        "async def respond(request, env, context):\n"
        "    return Response(f'{context.sandbox_id}: {request.url}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    await fetch(api.put("/api/sandboxes/box", json={"egress": {"outbound": f"{name}:respond"}}))
    assert await curl(api, "http://any.test/x") == "box: http://any.test/x\n200"


async def test_stored_handler_that_left_the_list_refuses_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that was stored fails closed when the operator takes its handler off the list."""
    name = f"handlers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from smokebox.egress import Response\n"
        "async def respond(request, env, context):\n"
        "    return Response('handled')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    home = str(tmp_path / "home")
    for allowed in ((f"{name}:respond",), (), ("handlers_*",), (f"{name}:other",)):
        settings = ServerSettings(home=home, host="127.0.0.1", pool=0, handlers=allowed)
        async with run_server(settings) as server:
            connector = aiohttp.UnixConnector(server.socket)
            async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
                if allowed == (f"{name}:respond",):
                    body = {"egress": {"outbound": f"{name}:respond"}}
                    await fetch(http.put("/api/sandboxes/box", json=body))
                text, _, status = (await curl(http, "http://any.test/x")).rpartition("\n")
                if allowed in ((f"{name}:respond",), ("handlers_*",)):
                    assert (text, status) == ("handled", "200")
                    continue
                assert status == "403"
                assert "`allow` in [handlers] of server.toml" in text
                log = (await fetch(http.get("/api/sandboxes/box/egress/log"))).body["events"]
                assert "is not among those that this server allows" in log[-1]["reason"]


@contextlib.asynccontextmanager
async def serve_handlers(
    http: aiohttp.ClientSession, *slots: str
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with http.ws_connect(HANDLERS) as socket:
        await socket.send_str(msgspec.json.encode(ServeFrame(number=1, slots=list(slots))).decode())
        assert json.loads((await socket.receive(SECONDS)).data) == {"type": "serving", "number": 1}
        yield socket


async def test_client_handles_requests_over_its_websocket(api: aiohttp.ClientSession) -> None:
    await fetch(
        api.put("/api/sandboxes/box", json={"egress": {"outbound_by_host": {"a.test": "@client"}}})
    )
    async with serve_handlers(api, "a.test") as socket:
        assert (await fetch(api.get(EGRESS))).body["served"] == ["a.test"]
        request = asyncio.create_task(curl(api, "http://a.test/x"))
        frame = from_server((await socket.receive(SECONDS)).data)
        assert isinstance(frame, HandleFrame)
        assert (frame.slot, frame.url, frame.body) == ("a.test", "http://a.test/x", False)
        refuse = {"type": "refuse", "id": frame.id, "reason": "because"}
        await socket.send_str(json.dumps(refuse))
        output = await request
        assert "because" in output
        assert output.endswith("403")
    async with asyncio.timeout(SECONDS):
        while (await fetch(api.get(EGRESS))).body["served"]:
            await asyncio.sleep(0.01)
    assert "none is connected" in await curl(api, "http://a.test/x")


async def test_client_that_disconnects_during_a_request_refuses_it(
    api: aiohttp.ClientSession,
) -> None:
    await fetch(api.put("/api/sandboxes/box", json={"egress": {"outbound": "@client"}}))
    async with serve_handlers(api, "") as socket:
        request = asyncio.create_task(curl(api, "http://a.test/x"))
        await socket.receive(SECONDS)
    output = await request
    assert "disconnected" in output
    assert output.endswith("403")


async def test_invalid_frames_get_an_error_and_change_nothing(
    api: aiohttp.ClientSession,
) -> None:
    async with serve_handlers(api, "") as socket:
        for text in ("{}", "[]", "x", '{"type": "handle"}'):
            await socket.send_str(text)
            error = json.loads((await socket.receive(SECONDS)).data)
            assert (error["type"], error["code"]) == ("error", "invalid_option")
        await socket.send_bytes(b"1")
        assert json.loads((await socket.receive(SECONDS)).data)["type"] == "error"
        late = SendFrame(id=9, method="GET", url="http://x/", headers=[], content=Content())
        await socket.send_str(msgspec.json.encode(late).decode())
        assert (await fetch(api.get(EGRESS))).body["served"] == [""]


async def test_log_is_paged_and_streamed_by_cursor(api: aiohttp.ClientSession) -> None:
    await fetch(api.put("/api/sandboxes/box", json={"egress": {"allowed_hosts": ["a.test"]}}))
    for name in ("one", "two", "three"):
        await curl(api, f"http://{name}.test/")
    events = (await fetch(api.get(f"{EGRESS}/log"))).body["events"]
    assert [event["host"] for event in events] == ["one.test", "two.test", "three.test"]
    after = {"after": events[0]["cursor"], "limit": 1}
    page = (await fetch(api.get(f"{EGRESS}/log", params=after))).body["events"]
    assert page == events[1:2]
    headers = {"last-event-id": str(events[1]["cursor"])}
    async with api.get(f"{EGRESS}/log/stream", headers=headers) as stream, asyncio.timeout(SECONDS):
        lines = [(await stream.content.readline()).decode() for _ in range(3)]
    assert lines[:2] == ["event: request\n", f"id: {events[2]['cursor']}\n"]
    assert json.loads(lines[2].removeprefix("data: ")) == events[2]


@pytest.mark.parametrize("query", [{"after": -1}, {"limit": 0}, {"limit": 1001}, {"after": "x"}])
async def test_invalid_log_queries_are_refused(
    api: aiohttp.ClientSession, query: dict[str, Any]
) -> None:
    response = await fetch(api.get(f"{EGRESS}/log", params=query))
    assert (response.status, response.code) == (400, "invalid_option")


async def test_log_of_a_sleeping_sandbox_is_readable(api: aiohttp.ClientSession) -> None:
    await fetch(api.put("/api/sandboxes/box", json={"egress": {"allowed_hosts": ["a.test"]}}))
    await curl(api, "http://one.test/")
    await fetch(api.post("/api/sandboxes/box/sleep"))
    events = (await fetch(api.get(f"{EGRESS}/log"))).body["events"]
    assert [event["host"] for event in events] == ["one.test"]
    assert (await fetch(api.get("/api/sandboxes/box"))).body["status"] == "idle"


async def test_network_events_are_counted_in_metrics(api: aiohttp.ClientSession) -> None:
    await fetch(api.put("/api/sandboxes/box", json={"egress": {"allowed_hosts": ["a.test"]}}))
    await curl(api, "http://one.test/")
    async with api.get("/metrics") as response:
        text = await response.text()
    assert 'smokebox_network_events{verdict="refused"} 1.0' in text
    assert 'smokebox_network_bytes{direction="sent"}' in text


async def test_shutdown_does_not_wait_for_handler_clients(
    tmp_path: Path,
) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), pool=0, drain_seconds=600)
    async with contextlib.AsyncExitStack() as stack:
        server: RunningServer = await stack.enter_async_context(run_server(settings))
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            await fetch(http.put("/api/sandboxes/box", json={}))
            async with serve_handlers(http, ""), asyncio.timeout(SECONDS):
                await stack.aclose()
