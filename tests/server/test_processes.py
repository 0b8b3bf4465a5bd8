"""Background processes over HTTP: start, wait, logs, stdin and signals."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from http_response import fetch
from killable_server import new_home, run_killable_server
from server.boxes import eventually
from smokebox.foundation.sse import EventReader

if TYPE_CHECKING:
    import aiohttp

    from smokebox.foundation.sse import Event
    from smokebox.server.server import RunningServer

SANDBOX = "/api/sandboxes/box"
PROCESSES = f"{SANDBOX}/processes"
COUNT = "for i in $(seq 2000); do echo line $i; [ $((i % 100)) = 0 ] && sleep 0.01; done"
LINES = "".join(f"line {i}\n" for i in range(1, 2001))


@pytest_asyncio.fixture(autouse=True)
async def _sandbox(http: aiohttp.ClientSession) -> None:
    assert (await fetch(http.put(SANDBOX, json={}))).status == 200


async def test_process_is_started_and_listed(http: aiohttp.ClientSession) -> None:
    body = {"command": ["sleep", "60"], "id": "one", "stdin": True}
    response = await fetch(http.post(PROCESSES, json=body))
    created = response.body
    assert (response.status, created["id"], created["command"]) == (201, "one", "sleep 60")
    assert (created["status"], created["exit_code"], created["stdin"]) == ("running", None, True)
    other = (await fetch(http.post(PROCESSES, json={"command": "true"}))).body
    assert (await fetch(http.get(f"{PROCESSES}/one"))).body == created
    listed = (await fetch(http.get(PROCESSES))).body["processes"]
    assert [process["id"] for process in listed] == ["one", other["id"]]


async def test_wait_returns_the_exit_code(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": "exit 3", "id": "one"}))
    response = await fetch(http.get(f"{PROCESSES}/one/wait", params={"timeout": "10"}))
    assert (response.status, response.body) == (200, {"exit_code": 3})
    assert (await fetch(http.get(f"{PROCESSES}/one"))).body["status"] == "exited"


async def test_wait_times_out(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": "sleep 60", "id": "one"}))
    response = await fetch(http.get(f"{PROCESSES}/one/wait", params={"timeout": "0.05"}))
    assert (response.status, response.code) == (504, "deadline_exceeded")


async def test_processes_are_killed_and_cleaned_up(http: aiohttp.ClientSession) -> None:
    for id in ("one", "two", "three"):
        await fetch(http.post(PROCESSES, json={"command": "sleep 60", "id": id}))
    assert (await fetch(http.post(f"{PROCESSES}/one/kill", json={"grace": 0}))).status == 204
    assert (await fetch(http.get(f"{PROCESSES}/one"))).body["status"] == "killed"
    assert (
        await fetch(http.post(f"{PROCESSES}/two/kill", json={"signal": "SIGINT"}))
    ).status == 204
    assert (await fetch(http.get(f"{PROCESSES}/two/wait"))).body == {"exit_code": 130}
    # The supervisor of the second may still be running, and does not count.
    assert (await fetch(http.post(f"{PROCESSES}/kill"))).body == {"count": 1}
    assert (await fetch(http.delete(PROCESSES))).body == {"count": 3}
    assert (await fetch(http.get(PROCESSES))).body == {"processes": []}


async def test_logs_are_returned_whole(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": "echo out; echo err >&2", "id": "one"}))
    await fetch(http.get(f"{PROCESSES}/one/wait"))
    response = await fetch(http.get(f"{PROCESSES}/one/logs"))
    assert response.body == {"stdout": "out\n", "stderr": "err\n"}


async def test_log_is_followed_to_the_exit(http: aiohttp.ClientSession) -> None:
    await fetch(
        http.post(PROCESSES, json={"command": "echo a; sleep 0.2; echo b; exit 4", "id": "one"})
    )
    events = await _events(http, f"{PROCESSES}/one/logs/stream")
    assert (_text(events), events[-1].name) == ("a\nb\n", "exit")
    assert json.loads(events[-1].data) == {"exit_code": 4}
    assert all(
        event.id == json.loads(event.data)["cursor"] for event in events if event.name == "output"
    )


async def test_log_is_streamed_without_following(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": "echo a; sleep 60", "id": "one"}))
    await fetch(http.post(f"{PROCESSES}/one/wait_for_log", json={"pattern": "a"}))
    events = await _events(http, f"{PROCESSES}/one/logs/stream?follow=false")
    assert [event.name for event in events] == ["output"]
    rest = await _events(http, f"{PROCESSES}/one/logs/stream?follow=false&replay=false")
    assert rest == []


async def test_log_resumes_at_a_cursor_without_gap_or_repeat(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": COUNT, "id": "one"}))
    text, cursor, exits = "", None, 0
    while not exits:
        headers = {"last-event-id": cursor or ""}
        # Disconnect after a few events, while the process writes.
        events = await _events(http, f"{PROCESSES}/one/logs/stream", most=2, headers=headers)
        text += _text(events)
        cursor = next((event.id for event in reversed(events) if event.id), cursor)
        exits = sum(event.name == "exit" for event in events)
    assert text == LINES
    again = await _events(http, f"{PROCESSES}/one/logs/stream?cursor={cursor}")
    assert [event.name for event in again] == ["exit"]


@pytest.mark.timeout(60)
async def test_log_resumes_after_the_server_was_killed() -> None:
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={}))
            # The second half is written only after the second server has started.
            first, second = (f"seq -f 'line %g' {half}" for half in ("1000", "1001 2000"))
            go = "until [ -e /tmp/go ]; do sleep 0.01; done"
            command = f"{first}; {go}; {second}; sleep 60"
            await fetch(http.post(PROCESSES, json={"command": command, "id": "one"}))
            before = await _events(http, f"{PROCESSES}/one/logs/stream", most=1)
            cursor = before[-1].id
        async with run_killable_server(home) as http:
            reading = asyncio.create_task(
                _events(
                    http, f"{PROCESSES}/one/logs/stream", headers={"last-event-id": str(cursor)}
                )
            )
            await fetch(http.post(f"{SANDBOX}/exec", json={"command": "touch /tmp/go"}))
            body = {"pattern": "line 2000"}
            assert (
                await fetch(http.post(f"{PROCESSES}/one/wait_for_log", json=body))
            ).status == 200
            await fetch(http.post(f"{PROCESSES}/one/kill", json={"grace": 0}))
            after = await reading
            await fetch(http.delete(SANDBOX))
    assert _text(before) + _text(after) == LINES
    assert json.loads(after[-1].data) == {"exit_code": 137}


async def test_disconnect_from_a_log_stream_releases_it(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await fetch(http.post(PROCESSES, json={"command": "echo a; sleep 60", "id": "one"}))
    process = await server.state.host.sandbox("box").processes.get("one")
    await _events(http, f"{PROCESSES}/one/logs/stream", most=1)
    await eventually(lambda: process.log._followers == 0)
    await _wait_for_active(server, 0)


async def test_disconnect_cancels_waits_and_stdin_writes(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await fetch(http.post(PROCESSES, json={"command": "sleep 60", "id": "one", "stdin": True}))
    big = b"x" * (1 << 20)
    for request in (
        http.get(f"{PROCESSES}/one/wait"),
        http.post(f"{PROCESSES}/one/wait_for_log", json={"pattern": "never"}),
        http.post(f"{PROCESSES}/one/wait_for_log", json={"pattern": "n.ver", "regex": True}),
        http.post(f"{PROCESSES}/one/wait_for_port", json={"port": 4000}),
        http.post(f"{PROCESSES}/one/stdin", data=big),
    ):
        waiting = asyncio.create_task(fetch(request))
        await _wait_for_active(server, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await _wait_for_active(server, 0)


async def test_wait_for_log_returns_the_match(http: aiohttp.ClientSession) -> None:
    command = "echo booting; sleep 0.1; echo listening on port 8080; sleep 60"
    await fetch(http.post(PROCESSES, json={"command": command, "id": "one"}))
    plain = await fetch(http.post(f"{PROCESSES}/one/wait_for_log", json={"pattern": "listening"}))
    assert plain.body == {
        "stream": "stdout",
        "line": "listening on port 8080",
        "text": "listening",
        "groups": [],
    }
    body = {"pattern": r"PORT (\d+)(x)?$", "regex": True, "flags": 2, "timeout": 10}
    matched = (await fetch(http.post(f"{PROCESSES}/one/wait_for_log", json=body))).body
    assert (matched["text"], matched["groups"]) == ("port 8080", ["8080", None])


async def test_match_at_the_end_of_an_incomplete_line_waits_for_the_rest(
    http: aiohttp.ClientSession,
) -> None:
    command = "printf 'port 80'; sleep 0.02; echo 80; sleep 60"
    await fetch(http.post(PROCESSES, json={"command": command, "id": "one"}))
    body = {"pattern": r"port (\d+)", "regex": True}
    matched = (await fetch(http.post(f"{PROCESSES}/one/wait_for_log", json=body))).body
    assert matched["groups"] == ["8080"]


async def test_wait_for_log_ends_with_the_process_or_the_timeout(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.post(PROCESSES, json={"command": "echo no; exit 2", "id": "ends"}))
    await fetch(http.post(PROCESSES, json={"command": "sleep 60", "id": "stays"}))
    for regex in (False, True):
        body = {"pattern": "yes", "regex": regex}
        ended = await fetch(
            http.post(f"{PROCESSES}/ends/wait_for_log", json={**body, "timeout": 10})
        )
        late = await fetch(
            http.post(f"{PROCESSES}/stays/wait_for_log", json={**body, "timeout": 0.3})
        )
        assert (ended.status, ended.code) == (409, "process_ended")
        assert (late.status, late.code) == (504, "deadline_exceeded")


async def test_pattern_with_catastrophic_backtracking_does_not_block_the_server(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(
        http.post(PROCESSES, json={"command": "printf %064d 0; echo; sleep 60", "id": "one"})
    )
    body = {"pattern": "(0*)*x", "regex": True}
    waiting = asyncio.create_task(fetch(http.post(f"{PROCESSES}/one/wait_for_log", json=body)))
    responses = 0
    while not waiting.done():
        async with asyncio.timeout(2):
            assert (await fetch(http.get(f"{PROCESSES}/one"))).status == 200
        responses += 1
    response = await waiting
    # Not the status: it is 200 if the response has started before the error.
    assert response.code == "invalid_option"
    assert "takes too long" in response.body["error"]["message"]
    assert responses > 10
    good = {"pattern": "0+", "regex": True}
    assert (await fetch(http.post(f"{PROCESSES}/one/wait_for_log", json=good))).status == 200


async def test_invalid_patterns_are_refused(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": "echo a", "id": "one"}))
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
        response = await fetch(http.post(f"{PROCESSES}/one/wait_for_log", json=body))
        assert (response.status, response.code) == (400, "invalid_option"), (pattern, flags)


async def test_wait_for_port(http: aiohttp.ClientSession) -> None:
    command = "exec python3 -m http.server 8123 --bind 127.0.0.1"
    await fetch(http.post(PROCESSES, json={"command": command, "id": "one"}))
    for body in (
        {"port": 8123},
        {"port": 8123, "mode": "tcp"},
        {"port": 8123, "status": [200, 299]},
    ):
        assert (await fetch(http.post(f"{PROCESSES}/one/wait_for_port", json=body))).status == 204
    late = {"port": 8124, "timeout": 0.2}
    response = await fetch(http.post(f"{PROCESSES}/one/wait_for_port", json=late))
    assert (response.status, response.code) == (504, "deadline_exceeded")


async def test_stdin_is_written_and_closed(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": "cksum", "id": "one", "stdin": True}))
    data = bytes(range(256)) * 2000
    assert (await fetch(http.post(f"{PROCESSES}/one/stdin", data=data))).status == 204
    assert (await fetch(http.post(f"{PROCESSES}/one/stdin", data=b""))).status == 204
    for _ in range(2):
        assert (await fetch(http.delete(f"{PROCESSES}/one/stdin"))).status == 204
    assert (await fetch(http.get(f"{PROCESSES}/one/wait"))).body == {"exit_code": 0}
    written = (await fetch(http.get(f"{PROCESSES}/one/logs"))).body["stdout"]
    assert written.split()[1] == str(len(data))


async def test_invalid_requests_are_refused(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"command": "sleep 60", "id": "one"}))
    await fetch(http.post(PROCESSES, json={"command": "true", "id": "ended", "stdin": True}))
    await fetch(http.get(f"{PROCESSES}/ended/wait"))
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
        response = await fetch(http.request(method, PROCESSES + path, json=body))
        assert (response.status, response.code) == expected, (method, path, body)


async def test_unknown_processes_and_sandboxes_are_not_found(http: aiohttp.ClientSession) -> None:
    for box in (SANDBOX, "/api/sandboxes/ghost"):
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
            response = await fetch(http.request(method, f"{box}/processes/ghost{path}", json=body))
            assert (response.status, response.code) == (404, "not_found"), (box, path)


async def _events(
    http: aiohttp.ClientSession, url: str, *, most: int | None = None, **options: Any
) -> list[Event]:
    """Return the events of a stream to its end, or the first `most` or more."""
    events: list[Event] = []
    reader = EventReader()
    async with http.get(url, **options) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        async for data in response.content.iter_any():
            events += reader.feed(data)
            if most is not None and len(events) >= most:
                break
    return events


def _text(events: list[Event]) -> str:
    return "".join(json.loads(event.data)["data"] for event in events if event.name == "output")


async def _wait_for_active(server: RunningServer, count: int) -> None:
    await eventually(lambda: server.state.host.sandbox("box").lifecycle._active == count)
