"""Code over HTTP: run, followed, interrupted, and the contexts that it runs in."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest_asyncio

from asking import ask
from smokebox.foundation.sse import EventReader

if TYPE_CHECKING:
    import aiohttp

BOX = "/api/sandboxes/box"
CODE = f"{BOX}/code"
ALL = f"{CODE}/contexts"


@pytest_asyncio.fixture(autouse=True)
async def _box(http: aiohttp.ClientSession) -> None:
    assert (await ask(http.put(BOX, json={}))).status == 200


async def follow(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """All events of code that is run as a stream."""
    reader, found = EventReader(), []
    async with http.post(f"{CODE}/stream", json=body) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        async for data in answer.content.iter_any():
            found += [(event.name, json.loads(event.data)) for event in reader.feed(data)]
    return found


async def test_code_is_run_and_all_that_came_of_it_is_told(http: aiohttp.ClientSession) -> None:
    body = {"code": "import sys\nprint('out')\nprint('err', file=sys.stderr)\n{'a': 6 * 7}"}
    answer = await ask(http.post(CODE, json=body))
    told = answer.body
    assert (answer.status, told["stdout"], told["stderr"]) == (200, "out\n", "err\n")
    assert (told["error"], told["count"], told["language"]) == (None, 1, "python")
    [result] = told["results"]
    assert (result["text"], result["json"], result["main"]) == ("{'a': 42}", {"a": 42}, True)
    broken = (await ask(http.post(CODE, json={"code": "1 / 0"}))).body
    assert (broken["error"]["name"], broken["error"]["line"]) == ("ZeroDivisionError", 1)
    assert (broken["count"], broken["context"]) == (2, told["context"])


async def test_pictures_go_as_base64(http: aiohttp.ClientSession) -> None:
    code = "class P:\n    def _repr_png_(self): return bytes(range(256))\nP()"
    told = (await ask(http.post(CODE, json={"code": code}))).body
    assert told["results"][0]["png"].startswith("AAECAwQF")


async def test_events_are_named_by_what_they_are(http: aiohttp.ClientSession) -> None:
    events = await follow(http, {"code": "print('a')\ndisplay(1)\n1 / 0"})
    assert [name for name, _ in events] == ["output", "result", "exception", "execution"]
    assert events[0][1] == {"stream": "stdout", "data": "a\n"}
    assert events[2][1]["name"] == "ZeroDivisionError"
    assert events[3][1]["error"]["name"] == "ZeroDivisionError"
    [(name, failure)] = await follow(http, {"code": "import os; os._exit(3)"})
    assert (name, failure["code"]) == ("error", "process_ended")


async def test_contexts_are_made_found_listed_and_deleted(http: aiohttp.ClientSession) -> None:
    wanted = {"id": "one", "cwd": "/tmp", "env": {"A": "x"}, "timeout": 5}
    made = await ask(http.post(ALL, json=wanted))
    assert (made.status, made.body["id"], made.body["cwd"]) == (201, "one", "/tmp")
    assert (made.body["timeout"], made.body["default"], made.body["busy"]) == (5.0, False, False)
    body = {"code": "import os; os.getcwd() + os.environ['A']", "context": "one"}
    assert (await ask(http.post(CODE, json=body))).body["results"][0]["text"] == "'/tmpx'"
    found = (await ask(http.get(f"{ALL}/one"))).body
    assert found["used_at"] >= made.body["used_at"]
    assert [one["id"] for one in (await ask(http.get(ALL))).body["contexts"]] == ["one"]
    assert (await ask(http.delete(f"{ALL}/one"))).status == 204
    assert (await ask(http.get(ALL))).body == {"contexts": []}
    assert (await ask(http.get(f"{ALL}/one"))).status == 404


async def test_a_repeated_request_makes_one_context(http: aiohttp.ClientSession) -> None:
    key = {"idempotency-key": "once"}
    first = await ask(http.post(ALL, json={}, headers=key))
    again = await ask(http.post(ALL, json={}, headers=key))
    assert first.body["id"] == again.body["id"]
    assert len((await ask(http.get(ALL))).body["contexts"]) == 1


async def test_whoever_leaves_interrupts_the_code(http: aiohttp.ClientSession) -> None:
    endless = "import time\nopen('begun', 'w').close()\nwhile True: time.sleep(0.01)"
    for path in ("", "/stream"):

        async def leave(path: str = path) -> None:
            async with http.post(f"{CODE}{path}", json={"code": endless}) as answer:
                await answer.read()

        leaving = asyncio.create_task(leave())
        query = {"path": "begun"}
        async with asyncio.timeout(15):
            while not (await ask(http.get(f"{BOX}/files/exists", params=query))).body["exists"]:
                await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert (await ask(http.delete(f"{BOX}/files", params=query))).status == 204
        told = (await ask(http.post(CODE, json={"code": "'free'"}))).body
        assert told["results"][0]["text"] == "'free'"
    assert told["count"] == 4


async def test_what_has_ended_says_how(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "dies"}))
    await ask(http.post(ALL, json={"id": "sleeps"}))
    for code in ("import os; os._exit(3)", "1"):
        died = await ask(http.post(CODE, json={"code": code, "context": "dies"}))
        assert (died.status, died.code) == (409, "process_ended")
    assert (await ask(http.get(f"{ALL}/dies"))).code == "process_ended"
    await ask(http.post(f"{BOX}/sleep"))
    stale = await ask(http.post(CODE, json={"code": "1", "context": "sleeps"}))
    assert (stale.status, stale.code) == (410, "sandbox_restarted")
    assert (await ask(http.get(f"{ALL}/sleeps"))).status == 410
    assert (await ask(http.delete(f"{ALL}/sleeps"))).status == 204


async def test_what_cannot_be_is_refused(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one"}))
    for path, body, expected in (
        (CODE, {}, (400, "invalid_option")),
        (CODE, {"code": 1}, (400, "invalid_option")),
        (CODE, {"code": "1", "langauge": "js"}, (400, "invalid_option")),
        (CODE, {"code": "1", "language": "cobol"}, (400, "invalid_option")),
        (CODE, {"code": "1", "timeout": -1}, (400, "invalid_option")),
        (CODE, {"code": "1", "env": {"A=": ""}}, (400, "invalid_option")),
        (CODE, {"code": "1", "context": "ghost"}, (404, "not_found")),
        (CODE, {"code": "1", "context": "one", "language": "ts"}, (400, "invalid_option")),
        (ALL, {"id": "one"}, (409, "conflict")),
        (ALL, {"id": "../x"}, (400, "invalid_option")),
        (ALL, {"cwd": "/no/such"}, (404, "path_not_found")),
        (ALL, {"cwd": "a\0b"}, (400, "invalid_path")),
    ):
        answer = await ask(http.post(path, json=body))
        assert (answer.status, answer.code) == expected, (path, body)
    for method, path in (("POST", CODE), ("GET", ALL), ("POST", ALL), ("DELETE", f"{ALL}/one")):
        given = {"code": "1"} if path == CODE else None
        asked = http.request(method, path.replace("/box/", "/ghost/"), json=given)
        assert (await ask(asked)).status == 404


async def test_ended_code_is_counted(http: aiohttp.ClientSession) -> None:
    await ask(http.post(CODE, json={"code": "1"}))
    await follow(http, {"code": "1 / 0"})
    async with http.get("/metrics") as answer:
        text = await answer.text()
    assert 'smokebox_code_runs_total{outcome="success"} 1.0' in text
    assert 'smokebox_code_runs_total{outcome="failure"} 1.0' in text
