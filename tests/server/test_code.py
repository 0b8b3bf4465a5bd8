"""The code interpreter over HTTP: runs, streams, interruption and contexts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from http_response import fetch
from smokebox.foundation.sse import EventReader

if TYPE_CHECKING:
    import aiohttp

SANDBOX = "/api/sandboxes/box"
CODE = f"{SANDBOX}/code"
CONTEXTS = f"{CODE}/contexts"


@pytest_asyncio.fixture(autouse=True)
async def _sandbox(http: aiohttp.ClientSession) -> None:
    assert (await fetch(http.put(SANDBOX, json={}))).status == 200


async def follow(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Run code as a stream, and return its events."""
    reader, events = EventReader(), []
    async with http.post(f"{CODE}/stream", json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        async for data in response.content.iter_any():
            events += [(event.name, json.loads(event.data)) for event in reader.feed(data)]
    return events


async def test_run_returns_output_results_and_errors(http: aiohttp.ClientSession) -> None:
    body = {"code": "import sys\nprint('out')\nprint('err', file=sys.stderr)\n{'a': 6 * 7}"}
    response = await fetch(http.post(CODE, json=body))
    execution = response.body
    assert (response.status, execution["stdout"], execution["stderr"]) == (200, "out\n", "err\n")
    assert (execution["error"], execution["count"], execution["language"]) == (None, 1, "python")
    [result] = execution["results"]
    assert (result["text"], result["json"], result["main"]) == ("{'a': 42}", {"a": 42}, True)
    broken = (await fetch(http.post(CODE, json={"code": "1 / 0"}))).body
    assert (broken["error"]["name"], broken["error"]["line"]) == ("ZeroDivisionError", 1)
    assert (broken["count"], broken["context"]) == (2, execution["context"])


async def test_images_are_base64(http: aiohttp.ClientSession) -> None:
    code = "class P:\n    def _repr_png_(self): return bytes(range(256))\nP()"
    execution = (await fetch(http.post(CODE, json={"code": code}))).body
    assert execution["results"][0]["png"].startswith("AAECAwQF")


async def test_stream_of_events(http: aiohttp.ClientSession) -> None:
    events = await follow(http, {"code": "print('a')\ndisplay(1)\n1 / 0"})
    assert [name for name, _ in events] == ["output", "result", "exception", "execution"]
    assert events[0][1] == {"stream": "stdout", "data": "a\n"}
    assert events[2][1]["name"] == "ZeroDivisionError"
    assert events[3][1]["error"]["name"] == "ZeroDivisionError"
    [(name, failure)] = await follow(http, {"code": "import os; os._exit(3)"})
    assert (name, failure["code"]) == ("error", "process_ended")


async def test_contexts_are_created_listed_and_deleted(http: aiohttp.ClientSession) -> None:
    options = {"id": "one", "cwd": "/tmp", "env": {"A": "x"}, "timeout": 5}
    created = await fetch(http.post(CONTEXTS, json=options))
    assert (created.status, created.body["id"], created.body["cwd"]) == (201, "one", "/tmp")
    assert (created.body["timeout"], created.body["default"], created.body["busy"]) == (
        5.0,
        False,
        False,
    )
    body = {"code": "import os; os.getcwd() + os.environ['A']", "context": "one"}
    assert (await fetch(http.post(CODE, json=body))).body["results"][0]["text"] == "'/tmpx'"
    found = (await fetch(http.get(f"{CONTEXTS}/one"))).body
    assert found["used_at"] >= created.body["used_at"]
    assert [context["id"] for context in (await fetch(http.get(CONTEXTS))).body["contexts"]] == [
        "one"
    ]
    assert (await fetch(http.delete(f"{CONTEXTS}/one"))).status == 204
    assert (await fetch(http.get(CONTEXTS))).body == {"contexts": []}
    assert (await fetch(http.get(f"{CONTEXTS}/one"))).status == 404


async def test_idempotency_key_creates_one_context(http: aiohttp.ClientSession) -> None:
    key = {"idempotency-key": "once"}
    first = await fetch(http.post(CONTEXTS, json={}, headers=key))
    again = await fetch(http.post(CONTEXTS, json={}, headers=key))
    assert first.body["id"] == again.body["id"]
    assert len((await fetch(http.get(CONTEXTS))).body["contexts"]) == 1


async def test_disconnect_interrupts_the_code(http: aiohttp.ClientSession) -> None:
    endless = "import time\nopen('started', 'w').close()\nwhile True: time.sleep(0.01)"
    for path in ("", "/stream"):

        async def run(path: str = path) -> None:
            async with http.post(f"{CODE}{path}", json={"code": endless}) as response:
                await response.read()

        running = asyncio.create_task(run())
        query = {"path": "started"}
        async with asyncio.timeout(15):
            while not (await fetch(http.get(f"{SANDBOX}/files/exists", params=query))).body[
                "exists"
            ]:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        assert (await fetch(http.delete(f"{SANDBOX}/files", params=query))).status == 204
        execution = (await fetch(http.post(CODE, json={"code": "'free'"}))).body
        assert execution["results"][0]["text"] == "'free'"
    assert execution["count"] == 4


async def test_ended_contexts_report_why(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(CONTEXTS, json={"id": "dies"}))
    await fetch(http.post(CONTEXTS, json={"id": "sleeps"}))
    for code in ("import os; os._exit(3)", "1"):
        ended = await fetch(http.post(CODE, json={"code": code, "context": "dies"}))
        assert (ended.status, ended.code) == (409, "process_ended")
    assert (await fetch(http.get(f"{CONTEXTS}/dies"))).code == "process_ended"
    await fetch(http.post(f"{SANDBOX}/sleep"))
    stale = await fetch(http.post(CODE, json={"code": "1", "context": "sleeps"}))
    assert (stale.status, stale.code) == (410, "sandbox_restarted")
    assert (await fetch(http.get(f"{CONTEXTS}/sleeps"))).status == 410
    assert (await fetch(http.delete(f"{CONTEXTS}/sleeps"))).status == 204


async def test_invalid_requests_are_refused(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(CONTEXTS, json={"id": "one"}))
    for path, body, expected in (
        (CODE, {}, (400, "invalid_option")),
        (CODE, {"code": 1}, (400, "invalid_option")),
        (CODE, {"code": "1", "langauge": "js"}, (400, "invalid_option")),
        (CODE, {"code": "1", "language": "cobol"}, (400, "invalid_option")),
        (CODE, {"code": "1", "timeout": -1}, (400, "invalid_option")),
        (CODE, {"code": "1", "env": {"A=": ""}}, (400, "invalid_option")),
        (CODE, {"code": "1", "context": "ghost"}, (404, "not_found")),
        (CODE, {"code": "1", "context": "one", "language": "ts"}, (400, "invalid_option")),
        (CONTEXTS, {"id": "one"}, (409, "conflict")),
        (CONTEXTS, {"id": "../x"}, (400, "invalid_option")),
        (CONTEXTS, {"cwd": "/no/such"}, (404, "path_not_found")),
        (CONTEXTS, {"cwd": "a\0b"}, (400, "invalid_path")),
    ):
        response = await fetch(http.post(path, json=body))
        assert (response.status, response.code) == expected, (path, body)
    for method, path in (
        ("POST", CODE),
        ("GET", CONTEXTS),
        ("POST", CONTEXTS),
        ("DELETE", f"{CONTEXTS}/one"),
    ):
        json_body = {"code": "1"} if path == CODE else None
        request = http.request(method, path.replace("/box/", "/ghost/"), json=json_body)
        assert (await fetch(request)).status == 404


async def test_runs_are_counted_in_metrics(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(CODE, json={"code": "1"}))
    await follow(http, {"code": "1 / 0"})
    async with http.get("/metrics") as response:
        text = await response.text()
    assert 'smokebox_code_runs_total{outcome="success"} 1.0' in text
    assert 'smokebox_code_runs_total{outcome="failure"} 1.0' in text
