"""The stdio of a process over a WebSocket: what it writes, what is written to it, its end."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from asking import ask
from killable_server import killable, new_home

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.server.server import RunningServer

BOX = "/api/sandboxes/box"
ALL = f"{BOX}/processes"
STDIO = f"{ALL}/one/stdio"
COUNT = "for i in $(seq 2000); do echo line $i; [ $((i % 100)) = 0 ] && sleep 0.01; done"
LINES = "".join(f"line {i}\n" for i in range(1, 2001))


@pytest_asyncio.fixture(autouse=True)
async def _box(http: aiohttp.ClientSession) -> None:
    assert (await ask(http.put(BOX, json={}))).status == 200


async def test_bytes_go_in_and_text_comes_out(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "cat; echo bye >&2", "stdin": True}))
    async with http.ws_connect(STDIO) as stdio:
        await stdio.send_bytes("grüße\n".encode())
        first = await stdio.receive_json()
        assert first == {**first, "type": "output", "stream": "stdout", "data": "grüße\n"}
        await stdio.send_json({"type": "close_stdin"})
        frames = await _rest(stdio)
        assert stdio.close_code == 1000
    assert [frame["type"] for frame in frames] == ["output", "exit"]
    assert (frames[0]["stream"], frames[0]["data"]) == ("stderr", "bye\n")
    assert frames[1] == {"type": "exit", "exit_code": 0}


async def test_much_goes_in_while_much_comes_out(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "tr a b", "stdin": True}))
    async with http.ws_connect(STDIO) as stdio:
        reading = asyncio.create_task(_rest(stdio))
        for _ in range(16):
            await stdio.send_bytes(b"a" * (1 << 18))
        await stdio.send_json({"type": "close_stdin"})
        frames = await reading
    assert _text(frames) == "b" * (16 << 18)


async def test_output_is_resumed_without_gap_or_repeat(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": COUNT}))
    frames: list[dict[str, Any]] = []
    query: dict[str, str] = {}
    while not frames or frames[-1]["type"] != "exit":
        async with http.ws_connect(STDIO, params=query) as stdio:
            for _ in range(2):
                frames.append(await stdio.receive_json())
                if frames[-1]["type"] == "exit":
                    break
                query = {"cursor": frames[-1]["cursor"]}
    assert _text(frames) == LINES


@pytest.mark.timeout(60)
async def test_output_is_resumed_after_the_server_was_killed() -> None:
    with new_home() as home:
        async with killable(home) as http:
            await ask(http.put(BOX, json={}))
            body = {"id": "one", "command": f"{COUNT}; cat", "stdin": True}
            await ask(http.post(ALL, json=body))
            async with http.ws_connect(STDIO) as stdio:
                frames = [await stdio.receive_json() for _ in range(3)]
        async with killable(home) as http:
            query = {"cursor": frames[-1]["cursor"]}
            async with http.ws_connect(STDIO, params=query) as stdio:
                await stdio.send_bytes(b"typed\n")
                await stdio.send_json({"type": "close_stdin"})
                frames += await _rest(stdio)
            await ask(http.delete(BOX))
    assert _text(frames) == LINES + "typed\n"
    assert frames[-1] == {"type": "exit", "exit_code": 0}


async def test_frames_that_are_wrong_are_answered_by_errors(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "cat", "stdin": True}))
    async with http.ws_connect(STDIO) as stdio:
        for text in ("", "{", "[]", "{}", '{"type": "resize"}', '{"type": null}'):
            await stdio.send_str(text)
            told = await stdio.receive_json()
            assert (told["type"], told["code"]) == ("error", "invalid_option"), text
        await stdio.send_bytes(b"goes on")
        assert (await stdio.receive_json())["data"] == "goes on"


async def test_a_process_without_stdin_says_so_and_is_followed(
    http: aiohttp.ClientSession,
) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "sleep 0.5; echo done; exit 3"}))
    async with http.ws_connect(STDIO) as stdio:
        await stdio.send_bytes(b"x")
        told = await stdio.receive_json()
        assert (told["type"], told["code"]) == ("error", "unsupported")
        frames = await _rest(stdio)
    assert _text(frames) == "done\n"
    assert frames[-1] == {"type": "exit", "exit_code": 3}


async def test_what_has_ended_can_be_read_again(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "echo a; exit 2"}))
    await ask(http.get(f"{ALL}/one/wait"))
    for query, types in (
        (("follow", "true"), ["output", "exit"]),
        (("follow", "false"), ["output"]),
    ):
        async with http.ws_connect(STDIO, params=[query]) as stdio:
            assert [frame["type"] for frame in await _rest(stdio)] == types


async def test_the_end_of_the_sandbox_is_an_error(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "echo a; sleep 60"}))
    async with http.ws_connect(STDIO) as stdio:
        assert (await stdio.receive_json())["data"] == "a\n"
        await ask(http.post(f"{BOX}/sleep"))
        frames = await _rest(stdio)
        assert stdio.close_code == 1008
    assert (frames[-1]["type"], frames[-1]["code"]) == ("error", "sandbox_restarted")


async def test_who_leaves_is_let_go_and_the_process_stays(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "echo a; sleep 60", "stdin": True}))
    async with http.ws_connect(STDIO) as stdio:
        assert (await stdio.receive_json())["data"] == "a\n"
    sandbox = server.state.host.sandbox("box")
    process = await sandbox.processes.get("one")
    await _until(lambda: process.log._followers == 0 and sandbox.life._active == 0)
    assert process.running


async def test_a_socket_that_cannot_be_is_refused_by_http(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": "true"}))
    for path, status in (
        (f"{STDIO}?cursor=no", 400),
        (f"{STDIO}?cursor=99-99", 400),
        (f"{STDIO}?since=1", 400),
        (f"{ALL}/ghost/stdio", 404),
        ("/api/sandboxes/ghost/processes/one/stdio", 404),
    ):
        try:
            async with http.ws_connect(path):
                raise AssertionError(path)
        except aiohttp.WSServerHandshakeError as error:
            assert error.status == status, path


async def _rest(stdio: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    async with asyncio.timeout(15):
        return [json.loads(frame.data) async for frame in stdio]


def _text(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["data"] for frame in frames if frame["type"] == "output")


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
