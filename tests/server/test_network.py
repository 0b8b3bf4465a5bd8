"""The network of sandboxes over HTTP: policy, changes, rights, handlers, log and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from asking import ask
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.handlers import HandleFrame, SendFrame, ServeFrame, from_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SECONDS = 20.0
EGRESS = "/api/sandboxes/box/egress"
HANDLERS = f"{EGRESS}/handlers"
IMPORTED = "smokebox.egress.builtin_handlers:log"


@pytest_asyncio.fixture
async def box(http: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that has a sandbox `box`."""
    assert (await ask(http.put("/api/sandboxes/box", json={}))).status == 200
    yield http


async def curl(http: aiohttp.ClientSession, url: str) -> str:
    command = f"curl -s -m 10 -w '\\n%{{http_code}}' {url}"
    told = await ask(http.post("/api/sandboxes/box/exec", json={"command": command}))
    return str(told.body["stdout"])


async def in_force(http: aiohttp.ClientSession) -> dict[str, Any]:
    told: dict[str, Any] = (await ask(http.get(EGRESS))).body["in_force"]
    return told


async def test_a_new_sandbox_reaches_nothing(box: aiohttp.ClientSession) -> None:
    told = (await ask(box.get(EGRESS))).body
    assert told["settings"] == {}
    assert told["served"] == []
    assert told["in_force"]["internet"] is False
    assert told["in_force"]["allowed_hosts"] is None


async def test_the_policy_comes_with_the_sandbox_and_a_later_one_replaces_it(
    box: aiohttp.ClientSession,
) -> None:
    policy = {"internet": True, "denied_hosts": ["evil.test"], "max_requests": 7}
    assert (await ask(box.put("/api/sandboxes/box", json={"egress": policy}))).status == 200
    assert (await ask(box.get(EGRESS))).body["settings"] == policy
    await ask(box.put("/api/sandboxes/box", json={"labels": {"a": "b"}}))
    assert (await ask(box.get(EGRESS))).body["settings"] == policy
    await ask(box.put("/api/sandboxes/box", json={"egress": ["a.test"]}))
    assert (await ask(box.get(EGRESS))).body["settings"] == {"allowed_hosts": ["a.test"]}


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"allowed_hosts": ["a.test"]}, 'Use {"egress": {"allowed_hosts": ...}}.'),
        ({"network": {}}, 'Use {"egress": {"allowed_hosts": ...}}.'),
        ({"egress": {"alowed_hosts": []}}, "Did you mean 'allowed_hosts'?"),
    ],
)
async def test_an_old_spelling_gets_an_error_that_names_the_new_one(
    box: aiohttp.ClientSession, body: dict[str, Any], hint: str
) -> None:
    told = await ask(box.put("/api/sandboxes/box", json=body))
    assert (told.status, told.code) == (400, "invalid_option")
    assert told.body["error"]["hint"] == hint


async def test_a_put_of_the_network_replaces_all_settings_and_keeps_changes(
    box: aiohttp.ClientSession,
) -> None:
    await ask(box.put("/api/sandboxes/box", json={"egress": {"internet": True}}))
    await ask(box.post(f"{EGRESS}/changes", json={"allow": ["new.test"]}))
    told = await ask(box.put(EGRESS, json={"denied_hosts": ["evil.test"]}))
    assert told.body["settings"] == {"denied_hosts": ["evil.test"]}
    assert told.body["in_force"]["opened_hosts"] == ["new.test"]
    told = await ask(box.delete(f"{EGRESS}/changes"))
    assert told.body["in_force"]["opened_hosts"] == []


async def test_changes_are_made_all_at_once_or_not_at_all(box: aiohttp.ClientSession) -> None:
    wrong = {"allow": ["good.test"], "deny": ["https://bad"]}
    told = await ask(box.post(f"{EGRESS}/changes", json=wrong))
    assert (told.status, told.code) == (400, "invalid_option")
    assert (await in_force(box))["opened_hosts"] == []
    right = {
        "allow": ["a.test"],
        "deny": ["b.test"],
        "outbound_by_host": {"C.test.": "@client"},
        "outbound": IMPORTED,
        "internet": True,
    }
    assert (await ask(box.post(f"{EGRESS}/changes", json=right))).status == 200
    found = await in_force(box)
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
async def test_what_makes_no_sense_is_refused(
    box: aiohttp.ClientSession, body: dict[str, Any]
) -> None:
    for url, content in (("/api/sandboxes/box", {"egress": body}), (EGRESS, body)):
        told = await ask(box.put(url, json=content))
        assert (told.status, told.code) == (400, "invalid_option"), told
    assert (await ask(box.get(EGRESS))).body["settings"] == {}


async def test_handlers_of_the_server_are_for_administrators(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server:
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as owner:
            key = (await ask(owner.post("/api/keys", json={"name": "x"}))).body["key"]
            assert (
                await ask(owner.put("/api/sandboxes/box", json={"egress": {"outbound": IMPORTED}}))
            ).status == 200
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as other:
            for told in (
                await ask(other.put("/api/sandboxes/box", json={"egress": {"outbound": IMPORTED}})),
                await ask(other.post("/api/sandboxes", json={"egress": {"outbound": IMPORTED}})),
                await ask(other.put(EGRESS, json={"outbound_by_host": {"a.test": IMPORTED}})),
                await ask(other.post(f"{EGRESS}/changes", json={"outbound": IMPORTED})),
            ):
                assert (told.status, told.code) == (403, "forbidden")
                assert "administrators" in told.body["error"]["message"]
            mine = await ask(
                other.put("/api/sandboxes/box", json={"egress": {"outbound": "@client"}})
            )
            assert mine.status == 200


async def test_a_handler_by_import_path_runs_in_the_server(
    box: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"handlers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from smokebox.egress import Response\n"
        "async def answer(request, env, context):\n"
        "    return Response(f'{context.sandbox_id}: {request.url}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    await ask(box.put("/api/sandboxes/box", json={"egress": {"outbound": f"{name}:answer"}}))
    assert await curl(box, "http://any.test/x") == "box: http://any.test/x\n200"


@contextlib.asynccontextmanager
async def serving(
    http: aiohttp.ClientSession, *slots: str
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with http.ws_connect(HANDLERS) as socket:
        await socket.send_str(msgspec.json.encode(ServeFrame(number=1, slots=list(slots))).decode())
        assert json.loads((await socket.receive(SECONDS)).data) == {"type": "serving", "number": 1}
        yield socket


async def test_a_client_is_asked_over_its_socket(box: aiohttp.ClientSession) -> None:
    await ask(
        box.put("/api/sandboxes/box", json={"egress": {"outbound_by_host": {"a.test": "@client"}}})
    )
    async with serving(box, "a.test") as socket:
        assert (await ask(box.get(EGRESS))).body["served"] == ["a.test"]
        asking = asyncio.create_task(curl(box, "http://a.test/x"))
        frame = from_server((await socket.receive(SECONDS)).data)
        assert isinstance(frame, HandleFrame)
        assert (frame.slot, frame.url, frame.body) == ("a.test", "http://a.test/x", False)
        refuse = {"type": "refuse", "id": frame.id, "reason": "because"}
        await socket.send_str(json.dumps(refuse))
        told = await asking
        assert "because" in told
        assert told.endswith("403")
    async with asyncio.timeout(SECONDS):
        while (await ask(box.get(EGRESS))).body["served"]:
            await asyncio.sleep(0.01)
    assert "none is connected" in await curl(box, "http://a.test/x")


async def test_a_client_that_leaves_in_the_middle_is_a_refusal(box: aiohttp.ClientSession) -> None:
    await ask(box.put("/api/sandboxes/box", json={"egress": {"outbound": "@client"}}))
    async with serving(box, "") as socket:
        asking = asyncio.create_task(curl(box, "http://a.test/x"))
        await socket.receive(SECONDS)
    told = await asking
    assert "went away" in told
    assert told.endswith("403")


async def test_frames_that_make_no_sense_are_told_and_change_nothing(
    box: aiohttp.ClientSession,
) -> None:
    async with serving(box, "") as socket:
        for wrong in ("{}", "[]", "x", '{"type": "handle"}'):
            await socket.send_str(wrong)
            told = json.loads((await socket.receive(SECONDS)).data)
            assert (told["type"], told["code"]) == ("error", "invalid_option")
        await socket.send_bytes(b"1")
        assert json.loads((await socket.receive(SECONDS)).data)["type"] == "error"
        late = SendFrame(id=9, method="GET", url="http://x/", headers=[], content=_empty())
        await socket.send_str(msgspec.json.encode(late).decode())
        assert (await ask(box.get(EGRESS))).body["served"] == [""]


def _empty() -> Any:
    from smokebox.wire.handlers import Content

    return Content()


async def test_the_log_is_read_by_cursor_and_followed(box: aiohttp.ClientSession) -> None:
    await ask(box.put("/api/sandboxes/box", json={"egress": {"allowed_hosts": ["a.test"]}}))
    for name in ("one", "two", "three"):
        await curl(box, f"http://{name}.test/")
    told = (await ask(box.get(f"{EGRESS}/log"))).body["events"]
    assert [one["host"] for one in told] == ["one.test", "two.test", "three.test"]
    after = {"after": told[0]["cursor"], "limit": 1}
    page = (await ask(box.get(f"{EGRESS}/log", params=after))).body["events"]
    assert page == told[1:2]
    headers = {"last-event-id": str(told[1]["cursor"])}
    async with box.get(f"{EGRESS}/log/stream", headers=headers) as stream, asyncio.timeout(SECONDS):
        lines = [(await stream.content.readline()).decode() for _ in range(3)]
    assert lines[:2] == ["event: request\n", f"id: {told[2]['cursor']}\n"]
    assert json.loads(lines[2].removeprefix("data: ")) == told[2]


@pytest.mark.parametrize("query", [{"after": -1}, {"limit": 0}, {"limit": 1001}, {"after": "x"}])
async def test_a_page_that_cannot_be_is_refused(
    box: aiohttp.ClientSession, query: dict[str, Any]
) -> None:
    told = await ask(box.get(f"{EGRESS}/log", params=query))
    assert (told.status, told.code) == (400, "invalid_option")


async def test_the_log_of_a_sandbox_that_sleeps_is_there(box: aiohttp.ClientSession) -> None:
    await ask(box.put("/api/sandboxes/box", json={"egress": {"allowed_hosts": ["a.test"]}}))
    await curl(box, "http://one.test/")
    await ask(box.post("/api/sandboxes/box/sleep"))
    told = (await ask(box.get(f"{EGRESS}/log"))).body["events"]
    assert [one["host"] for one in told] == ["one.test"]
    assert (await ask(box.get("/api/sandboxes/box"))).body["status"] == "idle"


async def test_metrics_count_what_was_asked(box: aiohttp.ClientSession) -> None:
    await ask(box.put("/api/sandboxes/box", json={"egress": {"allowed_hosts": ["a.test"]}}))
    await curl(box, "http://one.test/")
    async with box.get("/metrics") as answer:
        text = await answer.text()
    assert 'smokebox_network_events{verdict="refused"} 1.0' in text
    assert 'smokebox_network_bytes{direction="sent"}' in text


async def test_a_server_that_ends_does_not_wait_for_clients_of_handlers(
    tmp_path: Path,
) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), pool=0, drain_seconds=600)
    async with contextlib.AsyncExitStack() as stack:
        server: RunningServer = await stack.enter_async_context(run_server(settings))
        connector = aiohttp.UnixConnector(server.socket)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
            await ask(http.put("/api/sandboxes/box", json={}))
            async with serving(http, ""), asyncio.timeout(SECONDS):
                await stack.aclose()
