"""Processes over HTTP: started, listed, waited for, followed, typed to, ended."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from asking import ask
from killable_server import killable, new_home
from smokebox.foundation.sse import EventReader

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from smokebox.foundation.sse import Event
    from smokebox.server.server import RunningServer

BOX = "/api/sandboxes/box"
ALL = f"{BOX}/processes"
COUNT = "for i in $(seq 2000); do echo line $i; [ $((i % 100)) = 0 ] && sleep 0.01; done"
LINES = "".join(f"line {i}\n" for i in range(1, 2001))


@pytest_asyncio.fixture(autouse=True)
async def _box(http: aiohttp.ClientSession) -> None:
    assert (await ask(http.put(BOX, json={}))).status == 200


async def test_a_process_is_started_found_and_listed(http: aiohttp.ClientSession) -> None:
    body = {"command": ["sleep", "60"], "id": "one", "stdin": True}
    answer = await ask(http.post(ALL, json=body))
    made = answer.body
    assert (answer.status, made["id"], made["command"]) == (201, "one", "sleep 60")
    assert (made["status"], made["exit_code"], made["stdin"]) == ("running", None, True)
    other = (await ask(http.post(ALL, json={"command": "true"}))).body
    assert (await ask(http.get(f"{ALL}/one"))).body == made
    listed = (await ask(http.get(ALL))).body["processes"]
    assert [process["id"] for process in listed] == ["one", other["id"]]


async def test_a_process_is_waited_for(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "exit 3", "id": "one"}))
    answer = await ask(http.get(f"{ALL}/one/wait", params={"timeout": "10"}))
    assert (answer.status, answer.body) == (200, {"exit_code": 3})
    assert (await ask(http.get(f"{ALL}/one"))).body["status"] == "exited"


async def test_a_wait_ends_with_its_timeout(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "sleep 60", "id": "one"}))
    answer = await ask(http.get(f"{ALL}/one/wait", params={"timeout": "0.05"}))
    assert (answer.status, answer.code) == (504, "deadline_exceeded")


async def test_processes_are_ended_and_forgotten(http: aiohttp.ClientSession) -> None:
    for id in ("one", "two", "three"):
        await ask(http.post(ALL, json={"command": "sleep 60", "id": id}))
    assert (await ask(http.post(f"{ALL}/one/kill", json={"grace": 0}))).status == 204
    assert (await ask(http.get(f"{ALL}/one"))).body["status"] == "killed"
    assert (await ask(http.post(f"{ALL}/two/kill", json={"signal": "SIGINT"}))).status == 204
    assert (await ask(http.get(f"{ALL}/two/wait"))).body == {"exit_code": 130}
    # Who minded the second may be there for a moment longer, and does not count.
    assert (await ask(http.post(f"{ALL}/kill"))).body == {"count": 1}
    assert (await ask(http.delete(ALL))).body == {"count": 3}
    assert (await ask(http.get(ALL))).body == {"processes": []}


async def test_logs_are_given_whole(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "echo out; echo err >&2", "id": "one"}))
    await ask(http.get(f"{ALL}/one/wait"))
    answer = await ask(http.get(f"{ALL}/one/logs"))
    assert answer.body == {"stdout": "out\n", "stderr": "err\n"}


async def test_a_log_is_followed_to_the_exit(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "echo a; sleep 0.2; echo b; exit 4", "id": "one"}))
    events = await _events(http, f"{ALL}/one/logs/stream")
    assert (_text(events), events[-1].name) == ("a\nb\n", "exit")
    assert json.loads(events[-1].data) == {"exit_code": 4}
    assert all(one.id == json.loads(one.data)["cursor"] for one in events if one.name == "output")


async def test_a_log_is_given_without_following(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "echo a; sleep 60", "id": "one"}))
    await ask(http.post(f"{ALL}/one/wait_for_log", json={"pattern": "a"}))
    events = await _events(http, f"{ALL}/one/logs/stream?follow=false")
    assert [one.name for one in events] == ["output"]
    rest = await _events(http, f"{ALL}/one/logs/stream?follow=false&replay=false")
    assert rest == []


async def test_a_log_is_resumed_without_gap_or_repeat(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": COUNT, "id": "one"}))
    text, cursor, exits = "", None, 0
    while not exits:
        headers = {"last-event-id": cursor or ""}
        # Broken off after each few events, while the process writes.
        events = await _events(http, f"{ALL}/one/logs/stream", most=2, headers=headers)
        text += _text(events)
        cursor = next((one.id for one in reversed(events) if one.id), cursor)
        exits = sum(one.name == "exit" for one in events)
    assert text == LINES
    again = await _events(http, f"{ALL}/one/logs/stream?cursor={cursor}")
    assert [one.name for one in again] == ["exit"]


@pytest.mark.timeout(60)
async def test_a_log_is_resumed_after_the_server_was_killed() -> None:
    with new_home() as home:
        async with killable(home) as http:
            await ask(http.put(BOX, json={}))
            # The second half is for the second server, however few events the first comes in.
            first, second = (f"seq -f 'line %g' {half}" for half in ("1000", "1001 2000"))
            go = "until [ -e /tmp/go ]; do sleep 0.01; done"
            command = f"{first}; {go}; {second}; sleep 60"
            await ask(http.post(ALL, json={"command": command, "id": "one"}))
            before = await _events(http, f"{ALL}/one/logs/stream", most=1)
            cursor = before[-1].id
        async with killable(home) as http:
            # Followed by the id, as a browser does, and ended by a kill.
            reading = asyncio.create_task(
                _events(http, f"{ALL}/one/logs/stream", headers={"last-event-id": str(cursor)})
            )
            await ask(http.post(f"{BOX}/exec", json={"command": "touch /tmp/go"}))
            body = {"pattern": "line 2000"}
            assert (await ask(http.post(f"{ALL}/one/wait_for_log", json=body))).status == 200
            await ask(http.post(f"{ALL}/one/kill", json={"grace": 0}))
            after = await reading
            await ask(http.delete(BOX))
    assert _text(before) + _text(after) == LINES
    assert json.loads(after[-1].data) == {"exit_code": 137}


async def test_a_reader_who_leaves_is_let_go(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await ask(http.post(ALL, json={"command": "echo a; sleep 60", "id": "one"}))
    process = await server.state.host.sandbox("box").processes.get("one")
    await _events(http, f"{ALL}/one/logs/stream", most=1)
    await _until(lambda: process.log._followers == 0)
    assert await _active(server) == 0


async def test_who_stops_waiting_is_let_go(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await ask(http.post(ALL, json={"command": "sleep 60", "id": "one", "stdin": True}))
    big = b"x" * (1 << 20)
    for request in (
        http.get(f"{ALL}/one/wait"),
        http.post(f"{ALL}/one/wait_for_log", json={"pattern": "never"}),
        http.post(f"{ALL}/one/wait_for_log", json={"pattern": "n.ver", "regex": True}),
        http.post(f"{ALL}/one/wait_for_port", json={"port": 4000}),
        http.post(f"{ALL}/one/stdin", data=big),
    ):
        waiting = asyncio.create_task(ask(request))
        await _until_active(server, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await _until_active(server, 0)


async def test_lines_are_waited_for(http: aiohttp.ClientSession) -> None:
    command = "echo booting; sleep 0.1; echo listening on port 8080; sleep 60"
    await ask(http.post(ALL, json={"command": command, "id": "one"}))
    plain = await ask(http.post(f"{ALL}/one/wait_for_log", json={"pattern": "listening"}))
    assert plain.body == {
        "stream": "stdout",
        "line": "listening on port 8080",
        "text": "listening",
        "groups": [],
    }
    body = {"pattern": r"PORT (\d+)(x)?$", "regex": True, "flags": 2, "timeout": 10}
    matched = (await ask(http.post(f"{ALL}/one/wait_for_log", json=body))).body
    assert (matched["text"], matched["groups"]) == ("port 8080", ["8080", None])


async def test_a_match_at_the_end_of_what_is_written_waits_for_the_rest(
    http: aiohttp.ClientSession,
) -> None:
    command = "printf 'port 80'; sleep 0.02; echo 80; sleep 60"
    await ask(http.post(ALL, json={"command": command, "id": "one"}))
    body = {"pattern": r"port (\d+)", "regex": True}
    matched = (await ask(http.post(f"{ALL}/one/wait_for_log", json=body))).body
    assert matched["groups"] == ["8080"]


async def test_waiting_for_a_line_ends_with_the_process_or_the_timeout(
    http: aiohttp.ClientSession,
) -> None:
    await ask(http.post(ALL, json={"command": "echo no; exit 2", "id": "ends"}))
    await ask(http.post(ALL, json={"command": "sleep 60", "id": "stays"}))
    for regex in (False, True):
        body = {"pattern": "yes", "regex": regex, "timeout": 0.3}
        ended = await ask(http.post(f"{ALL}/ends/wait_for_log", json=body))
        late = await ask(http.post(f"{ALL}/stays/wait_for_log", json=body))
        assert (ended.status, ended.code) == (409, "process_ended")
        assert (late.status, late.code) == (504, "deadline_exceeded")


async def test_a_pattern_that_takes_for_ever_holds_nobody_up(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "printf %064d 0; echo; sleep 60", "id": "one"}))
    body = {"pattern": "(0*)*x", "regex": True}
    waiting = asyncio.create_task(ask(http.post(f"{ALL}/one/wait_for_log", json=body)))
    answered = 0
    while not waiting.done():
        async with asyncio.timeout(2):
            assert (await ask(http.get(f"{ALL}/one"))).status == 200
        answered += 1
    answer = await waiting
    # The status is 200 where the machine is so slow that the answer has begun before.
    assert answer.code == "invalid_option"
    assert "takes too long" in answer.body["error"]["message"]
    assert answered > 10
    good = {"pattern": "0+", "regex": True}
    assert (await ask(http.post(f"{ALL}/one/wait_for_log", json=good))).status == 200


async def test_bad_patterns_are_refused(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "echo a", "id": "one"}))
    for pattern, flags in (
        ("(", 0),
        ("", 0),
        ("a" * 5000, 0),
        ("(" * 2000, 0),
        ("(" * 2000 + ")" * 2000, 0),
        ("a", 128),
        ("a", 4),
        ("a", -1),
        ("(?L)a", 0),
    ):
        body = {"pattern": pattern, "regex": True, "flags": flags}
        answer = await ask(http.post(f"{ALL}/one/wait_for_log", json=body))
        assert (answer.status, answer.code) == (400, "invalid_option"), (pattern, flags)


async def test_a_port_is_waited_for(http: aiohttp.ClientSession) -> None:
    command = "exec python3 -m http.server 8123 --bind 127.0.0.1"
    await ask(http.post(ALL, json={"command": command, "id": "one"}))
    for body in (
        {"port": 8123},
        {"port": 8123, "mode": "tcp"},
        {"port": 8123, "status": [200, 299]},
    ):
        assert (await ask(http.post(f"{ALL}/one/wait_for_port", json=body))).status == 204
    late = {"port": 8124, "timeout": 0.2}
    answer = await ask(http.post(f"{ALL}/one/wait_for_port", json=late))
    assert (answer.status, answer.code) == (504, "deadline_exceeded")


async def test_stdin_is_written_and_closed(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "cksum", "id": "one", "stdin": True}))
    data = bytes(range(256)) * 2000
    assert (await ask(http.post(f"{ALL}/one/stdin", data=data))).status == 204
    assert (await ask(http.post(f"{ALL}/one/stdin", data=b""))).status == 204
    for _ in range(2):
        assert (await ask(http.delete(f"{ALL}/one/stdin"))).status == 204
    assert (await ask(http.get(f"{ALL}/one/wait"))).body == {"exit_code": 0}
    written = (await ask(http.get(f"{ALL}/one/logs"))).body["stdout"]
    assert written.split()[1] == str(len(data))


async def test_what_cannot_be_is_refused(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"command": "sleep 60", "id": "one"}))
    await ask(http.post(ALL, json={"command": "true", "id": "ended", "stdin": True}))
    await ask(http.get(f"{ALL}/ended/wait"))
    bad, conflict = (400, "invalid_option"), (409, "conflict")
    for method, path, body, expected in (
        ("POST", "", {}, bad),
        ("POST", "", {"command": 1}, bad),
        ("POST", "", {"command": "true", "id": "a/b"}, bad),
        ("POST", "", {"command": "true", "timeout": -1}, bad),
        ("POST", "", {"command": "true", "id": "one"}, conflict),
        ("POST", "", {"command": ["no-such-program"]}, (404, "path_not_found")),
        ("POST", "", {"command": "true", "cwd": "/nowhere"}, (404, "path_not_found")),
        ("POST", "/one/kill", {"signal": "SIGNOPE"}, bad),
        ("POST", "/one/kill", {"grace": -1}, bad),
        ("POST", "/kill", {"signal": "SIGNOPE"}, bad),
        ("GET", "/one/wait?timeout=no", None, bad),
        ("GET", "/one/logs/stream?cursor=no", None, bad),
        ("GET", "/one/logs/stream?cursor=99-99", None, bad),
        ("GET", "/one/logs/stream?follow=maybe", None, bad),
        ("POST", "/one/wait_for_log", {"pattern": ""}, bad),
        ("POST", "/one/wait_for_port", {"port": 0}, bad),
        ("POST", "/one/wait_for_port", {"port": 80, "mode": "udp"}, bad),
        ("POST", "/one/wait_for_port", {"port": 80, "status": [1, 2, 3]}, bad),
        ("POST", "/one/stdin", None, (501, "unsupported")),
        ("DELETE", "/one/stdin", None, (501, "unsupported")),
        ("POST", "/ended/stdin", None, (409, "process_ended")),
        ("POST", "/ended/wait_for_port", {"port": 80}, (409, "process_ended")),
    ):
        answer = await ask(http.request(method, ALL + path, json=body))
        assert (answer.status, answer.code) == expected, (method, path, body)


async def test_unknown_names_are_not_found(http: aiohttp.ClientSession) -> None:
    for box in (BOX, "/api/sandboxes/ghost"):
        for method, path, body in (
            ("GET", "", None),
            ("POST", "/kill", {}),
            ("GET", "/logs", None),
            ("GET", "/logs/stream", None),
            ("GET", "/wait", None),
            ("POST", "/wait_for_log", {"pattern": "x"}),
            ("POST", "/wait_for_log", {"pattern": "x", "regex": True}),
            ("POST", "/wait_for_port", {"port": 80}),
            ("POST", "/stdin", None),
            ("DELETE", "/stdin", None),
        ):
            answer = await ask(http.request(method, f"{box}/processes/ghost{path}", json=body))
            assert (answer.status, answer.code) == (404, "not_found"), (box, path)


async def _events(
    http: aiohttp.ClientSession, url: str, *, most: int | None = None, **options: Any
) -> list[Event]:
    """The events of a stream to its end, or to the first few."""
    events: list[Event] = []
    reader = EventReader()
    async with http.get(url, **options) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        async for data in answer.content.iter_any():
            events += reader.feed(data)
            if most is not None and len(events) >= most:
                break
    return events


def _text(events: list[Event]) -> str:
    return "".join(json.loads(one.data)["data"] for one in events if one.name == "output")


async def _until_active(server: RunningServer, count: int) -> None:
    await _until(lambda: server.state.host.sandbox("box").life._active == count)


async def _active(server: RunningServer) -> int:
    await _until_active(server, 0)
    return server.state.host.sandbox("box").life._active


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
