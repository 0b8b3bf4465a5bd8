"""The stdio of a process over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from http_response import fetch
from killable_server import new_home, run_killable_server
from server.boxes import eventually

if TYPE_CHECKING:
    from smokebox.server.server import RunningServer

SANDBOX = "/api/sandboxes/box"
PROCESSES = f"{SANDBOX}/processes"
STDIO = f"{PROCESSES}/one/stdio"
COUNT = "for i in $(seq 2000); do echo line $i; [ $((i % 100)) = 0 ] && sleep 0.01; done"
LINES = "".join(f"line {i}\n" for i in range(1, 2001))


@pytest_asyncio.fixture(autouse=True)
async def _sandbox(http: aiohttp.ClientSession) -> None:
    assert (await fetch(http.put(SANDBOX, json={}))).status == 200


async def test_input_is_bytes_and_output_is_text(http: aiohttp.ClientSession) -> None:
    await fetch(
        http.post(PROCESSES, json={"id": "one", "command": "cat; echo bye >&2", "stdin": True})
    )
    async with http.ws_connect(STDIO) as stdio:
        await stdio.send_bytes("grüße\n".encode())
        first = await stdio.receive_json()
        assert first == {**first, "type": "output", "stream": "stdout", "data": "grüße\n"}
        await stdio.send_json({"type": "close_stdin"})
        frames = await _remaining_frames(stdio)
        assert stdio.close_code == 1000
    assert [frame["type"] for frame in frames] == ["output", "exit"]
    assert (frames[0]["stream"], frames[0]["data"]) == ("stderr", "bye\n")
    assert frames[1] == {"type": "exit", "exit_code": 0}


async def test_large_input_and_output_at_once(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"id": "one", "command": "tr a b", "stdin": True}))
    async with http.ws_connect(STDIO) as stdio:
        reading = asyncio.create_task(_remaining_frames(stdio))
        for _ in range(16):
            await stdio.send_bytes(b"a" * (1 << 18))
        await stdio.send_json({"type": "close_stdin"})
        frames = await reading
    assert _output(frames) == "b" * (16 << 18)


async def test_output_resumes_at_a_cursor_without_gap_or_repeat(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.post(PROCESSES, json={"id": "one", "command": COUNT}))
    frames: list[dict[str, Any]] = []
    query: dict[str, str] = {}
    while not frames or frames[-1]["type"] != "exit":
        async with http.ws_connect(STDIO, params=query) as stdio:
            for _ in range(2):
                frames.append(await stdio.receive_json())
                if frames[-1]["type"] == "exit":
                    break
                query = {"cursor": frames[-1]["cursor"]}
    assert _output(frames) == LINES


@pytest.mark.timeout(60)
async def test_output_resumes_after_the_server_was_killed() -> None:
    with new_home() as home:
        async with run_killable_server(home) as http:
            await fetch(http.put(SANDBOX, json={}))
            body = {"id": "one", "command": f"{COUNT}; cat", "stdin": True}
            await fetch(http.post(PROCESSES, json=body))
            async with http.ws_connect(STDIO) as stdio:
                frames = [await stdio.receive_json() for _ in range(3)]
        async with run_killable_server(home) as http:
            query = {"cursor": frames[-1]["cursor"]}
            async with http.ws_connect(STDIO, params=query) as stdio:
                await stdio.send_bytes(b"typed\n")
                await stdio.send_json({"type": "close_stdin"})
                frames += await _remaining_frames(stdio)
            await fetch(http.delete(SANDBOX))
    assert _output(frames) == LINES + "typed\n"
    assert frames[-1] == {"type": "exit", "exit_code": 0}


async def test_invalid_frames_get_an_error_frame(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"id": "one", "command": "cat", "stdin": True}))
    async with http.ws_connect(STDIO) as stdio:
        for text in ("", "{", "[]", "{}", '{"type": "resize"}', '{"type": null}'):
            await stdio.send_str(text)
            error = await stdio.receive_json()
            assert (error["type"], error["code"]) == ("error", "invalid_option"), text
        await stdio.send_bytes(b"still open")
        assert (await stdio.receive_json())["data"] == "still open"


async def test_input_to_a_process_without_stdin_gets_an_error_frame(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.post(PROCESSES, json={"id": "one", "command": "sleep 0.5; echo done; exit 3"}))
    async with http.ws_connect(STDIO) as stdio:
        await stdio.send_bytes(b"x")
        error = await stdio.receive_json()
        assert (error["type"], error["code"]) == ("error", "unsupported")
        frames = await _remaining_frames(stdio)
    assert _output(frames) == "done\n"
    assert frames[-1] == {"type": "exit", "exit_code": 3}


async def test_output_of_an_ended_process_can_be_read_again(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"id": "one", "command": "echo a; exit 2"}))
    await fetch(http.get(f"{PROCESSES}/one/wait"))
    for query, types in (
        (("follow", "true"), ["output", "exit"]),
        (("follow", "false"), ["output"]),
    ):
        async with http.ws_connect(STDIO, params=[query]) as stdio:
            assert [frame["type"] for frame in await _remaining_frames(stdio)] == types


async def test_sleep_of_the_sandbox_ends_the_socket_with_an_error(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.post(PROCESSES, json={"id": "one", "command": "echo a; sleep 60"}))
    async with http.ws_connect(STDIO) as stdio:
        assert (await stdio.receive_json())["data"] == "a\n"
        await fetch(http.post(f"{SANDBOX}/sleep"))
        frames = await _remaining_frames(stdio)
        assert stdio.close_code == 1008
    assert (frames[-1]["type"], frames[-1]["code"]) == ("error", "sandbox_restarted")


async def test_disconnect_releases_the_stream_and_keeps_the_process(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await fetch(
        http.post(PROCESSES, json={"id": "one", "command": "echo a; sleep 60", "stdin": True})
    )
    async with http.ws_connect(STDIO) as stdio:
        assert (await stdio.receive_json())["data"] == "a\n"
    sandbox = server.state.host.sandbox("box")
    process = await sandbox.processes.get("one")
    await eventually(lambda: process.log._followers == 0 and sandbox.lifecycle._active == 0)
    assert process.running


async def test_invalid_sockets_are_refused_with_an_http_status(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(PROCESSES, json={"id": "one", "command": "true"}))
    for path, status in (
        (f"{STDIO}?cursor=no", 400),
        (f"{STDIO}?cursor=99-99", 400),
        (f"{STDIO}?since=1", 400),
        (f"{PROCESSES}/ghost/stdio", 404),
        ("/api/sandboxes/ghost/processes/one/stdio", 404),
    ):
        try:
            async with http.ws_connect(path):
                raise AssertionError(path)
        except aiohttp.WSServerHandshakeError as error:
            assert error.status == status, path


async def _remaining_frames(stdio: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    async with asyncio.timeout(15):
        return [json.loads(frame.data) async for frame in stdio]


def _output(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["data"] for frame in frames if frame["type"] == "output")
