"""Terminals over HTTP and WebSockets: opened, watched by several, typed to, closed."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from asking import ask
from smokebox.server import websocket
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.frames import LARGEST_FRAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from smokebox.server.server import RunningServer

BOX = "/api/sandboxes/box"
ALL = f"{BOX}/terminals"
CAT = {"id": "one", "command": ["bash", "-c", "stty raw -echo; echo begun; cat"]}


@pytest_asyncio.fixture(autouse=True)
async def _box(http: aiohttp.ClientSession) -> None:
    assert (await ask(http.put(BOX, json={}))).status == 200


@pytest_asyncio.fixture
async def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    """A server that soon takes those who do not answer for dead."""
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.2)
    monkeypatch.setattr(websocket, "PONG_SECONDS", 0.2)
    async with run_server(ServerSettings(home=str(tmp_path / "quick"), pool=0)) as server:
        yield server


async def test_a_terminal_is_opened_found_listed_and_closed(http: aiohttp.ClientSession) -> None:
    body = {"id": "one", "command": ["sleep", "60"], "cols": 100, "rows": 30}
    made = await ask(http.post(ALL, json=body))
    assert made.status == 201
    assert {**made.body, "created_at": 0} == {
        "id": "one",
        "command": "sleep 60",
        "cols": 100,
        "rows": 30,
        "created_at": 0,
        "exit_code": None,
    }
    assert (await ask(http.get(f"{ALL}/one"))).body == made.body
    assert (await ask(http.get(ALL))).body == {"terminals": [made.body]}
    assert (await ask(http.delete(f"{ALL}/one"))).status == 204
    assert (await ask(http.get(f"{ALL}/one"))).status == 404


async def test_what_is_typed_is_answered(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one"}))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await viewer.send_bytes(b"echo $((6 * 7))\n")
        await _shows(viewer, b"\r42\r\n")
        await viewer.send_bytes(b"exit 3\n")
        assert await _last_text(viewer) == {"type": "exit", "code": 3}
        assert viewer.close_code == 1000
    assert (await ask(http.get(f"{ALL}/one"))).body["exit_code"] == 3


async def test_who_comes_later_sees_what_was_there_and_then_that_it_is_ready(
    http: aiohttp.ClientSession,
) -> None:
    await ask(http.post(ALL, json=CAT))
    async with http.ws_connect(f"{ALL}/one") as first:
        await _shows(first, b"begun")
        await first.send_bytes(b"before")
        await _shows(first, b"before")
        async with http.ws_connect(f"{ALL}/one") as second:
            assert (await second.receive_bytes()).endswith(b"before")
            assert await second.receive_json() == {"type": "ready"}
            await second.send_bytes(b"after")
            await _shows(first, b"after")
            await _shows(second, b"after")


async def test_a_terminal_that_has_ended_can_be_looked_at(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": ["bash", "-c", "echo said; exit 7"]}))
    for _ in range(2):
        async with http.ws_connect(f"{ALL}/one") as viewer:
            frames = [frame async for frame in viewer]
        # The first may come before the program has written.
        text = [json.loads(frame.data) for frame in frames if frame.type is aiohttp.WSMsgType.TEXT]
        data = [frame.data for frame in frames if frame.type is aiohttp.WSMsgType.BINARY]
        assert (b"".join(data), text) == (
            b"said\r\n",
            [{"type": "ready"}, {"type": "exit", "code": 7}],
        )
    assert frames[0].type is aiohttp.WSMsgType.BINARY


async def test_a_terminal_is_given_another_size(http: aiohttp.ClientSession) -> None:
    command = ["bash", "-c", "echo begun; while stty size; do sleep 0.05; done"]
    await ask(http.post(ALL, json={"id": "one", "command": command}))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await _shows(viewer, b"begun")
        await viewer.send_json({"type": "resize", "cols": 90, "rows": 31})
        await _shows(viewer, b"31 90")
        resized = await ask(http.post(f"{ALL}/one/resize", json={"cols": 91, "rows": 32}))
        await _shows(viewer, b"32 91")
    assert (resized.body["cols"], resized.body["rows"]) == (91, 32)


async def test_bytes_go_both_ways_as_they_are(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json=CAT))
    data = os.urandom(1 << 19)
    async with http.ws_connect(f"{ALL}/one", max_msg_size=0) as viewer:
        await _shows(viewer, b"begun\n")
        sending = asyncio.create_task(viewer.send_bytes(data))
        assert await _receive(viewer, len(data)) == data
        await sending


async def test_frames_that_are_wrong_are_answered_by_errors(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json=CAT))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await _shows(viewer, b"begun")
        await viewer.send_bytes(b"typed")
        await _shows(viewer, b"typed")
        for text in (
            "",
            "{",
            "[]",
            "null",
            '"resize"',
            "{}",
            '{"type": "dance"}',
            '{"type": 1}',
            '{"type": "resize"}',
            '{"type": "resize", "cols": "80", "rows": 24}',
            '{"type": "resize", "cols": 0, "rows": 24}',
            '{"type": "resize", "cols": 80, "rows": 99999999999999999999}',
            '{"type": "ready"}',
            "[" * 100_000,
        ):
            await viewer.send_str(text)
            told = await viewer.receive_json()
            assert (told["type"], told["code"]) == ("error", "invalid_option"), text
            assert told["message"]
        await viewer.send_bytes(b"goes on")
        await _shows(viewer, b"goes on")


async def test_frames_that_no_socket_takes_close_it(
    http: aiohttp.ClientSession, capfd: pytest.CaptureFixture[str]
) -> None:
    await ask(http.post(ALL, json=CAT))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        # Its head alone: who sends on does not read why it was closed.
        assert viewer._response.connection is not None
        assert viewer._response.connection.transport is not None
        head = struct.pack("!BBQI", 0x82, 0xFF, LARGEST_FRAME + 1, 0)
        viewer._response.connection.transport.write(head)
        assert await _close_code(viewer) == 1009
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await viewer._writer.send_frame(b"\xff\xfe", aiohttp.WSMsgType.TEXT)
        assert await _close_code(viewer) == 1007
    assert (await ask(http.get(f"{ALL}/one"))).body["exit_code"] is None
    assert "Traceback" not in capfd.readouterr().err


async def test_a_socket_is_closed_for_a_bad_frame_in_the_middle_of_output(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(http.post(ALL, json={"id": "one", "command": ["yes"]}))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await _shows(viewer, b"y\r\n" * 100)
        await viewer._writer.send_frame(b"\xff\xfe", aiohttp.WSMsgType.TEXT)
        assert await _close_code(viewer) == 1007
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_program_that_does_not_read_holds_back_who_types(quick: RunningServer) -> None:
    async with _client(quick) as http:
        await ask(http.put(BOX, json={}))
        command = ["bash", "-c", "stty raw -echo; echo begun; sleep 60"]
        await ask(http.post(ALL, json={"id": "one", "command": command}))
        async with http.ws_connect(f"{ALL}/one") as viewer:
            await _shows(viewer, b"begun")
            sent = 0
            with pytest.raises(TimeoutError):
                while sent < 64 << 20:
                    async with asyncio.timeout(1):
                        await viewer.send_bytes(bytes(1 << 16))
                    sent += 1 << 16
            # What the buffers of two sockets hold, and not what a server has read.
            assert sent < 16 << 20
            assert viewer._response.connection is not None
            assert viewer._response.connection.transport is not None
            viewer._response.connection.transport.abort()
        # Nothing is read of who cannot type on, and still their end is noticed.
        await _until(lambda: not quick.state.drain.requests)


async def test_closing_a_terminal_ends_its_viewers(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json=CAT))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await _shows(viewer, b"begun")
        assert (await ask(http.delete(f"{ALL}/one"))).status == 204
        assert (await _last_text(viewer))["type"] == "exit"
        assert viewer.close_code == 1000


async def test_viewers_hear_that_the_sandbox_stopped(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json=CAT))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await _shows(viewer, b"begun")
        assert (await ask(http.delete(BOX))).status == 204
        told = await _last_text(viewer)
        assert (told["type"], told["code"]) == ("error", "sandbox_gone")
        assert viewer.close_code == 1008


async def test_a_viewer_who_leaves_is_let_go(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await ask(http.post(ALL, json=CAT))
    async with http.ws_connect(f"{ALL}/one") as viewer:
        await _shows(viewer, b"begun")
    terminal = await server.state.host.sandbox("box").terminals.get("one")
    await _until(lambda: not terminal._output._views)
    assert terminal.running


async def test_a_terminal_of_one_socket_ends_with_it(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await ask(http.post(f"{BOX}/sessions", json={"id": "s", "env": {"A": "from session"}}))
    query = {"cols": "90", "rows": "31", "session": "s", "command": "bash", "cwd": "/tmp"}
    async with http.ws_connect(f"{BOX}/terminal", params=query) as viewer:
        await viewer.send_bytes(b"echo $PWD $A $(stty size)\n")
        await _shows(viewer, b"\r/tmp from session 31 90\r\n")
        assert len((await ask(http.get(ALL))).body["terminals"]) == 1
    await _until(lambda: not server.state.host.sandbox("box").terminals._known)
    async with http.ws_connect(f"{BOX}/terminal") as viewer:
        await viewer.send_bytes(b"exit 5\n")
        assert await _last_text(viewer) == {"type": "exit", "code": 5}
    await _until(lambda: not server.state.host.sandbox("box").terminals._known)


async def test_a_socket_that_cannot_be_is_refused_by_http(http: aiohttp.ClientSession) -> None:
    for path, expected in (
        ("/api/sandboxes/ghost/terminals/one", (404, "not_found")),
        ("/api/sandboxes/ghost/terminal", (404, "not_found")),
        (f"{ALL}/ghost", (404, "not_found")),
        (f"{BOX}/terminal?cols=0", (400, "invalid_option")),
        (f"{BOX}/terminal?cols=x", (400, "invalid_option")),
        (f"{BOX}/terminal?shell=bash", (400, "invalid_option")),
        (f"{BOX}/terminal?session=ghost", (404, "not_found")),
        (f"{BOX}/terminal?command=no-such-program", (404, "path_not_found")),
        (f"{BOX}/nothing", (404, "not_found")),
    ):
        answer = await ask(http.get(path, headers=_upgrade()))
        assert (answer.status, answer.code) == expected, path
    assert (await ask(http.get(ALL))).body == {"terminals": []}


async def test_what_cannot_be_is_refused(http: aiohttp.ClientSession) -> None:
    await ask(http.post(ALL, json=CAT))
    ended = {"id": "ended", "command": ["true"]}
    await ask(http.post(ALL, json=ended))
    async with http.ws_connect(f"{ALL}/ended") as viewer:
        await _last_text(viewer)
    bad = (400, "invalid_option")
    for path, body, expected in (
        ("", {"cols": 0}, bad),
        ("", {"rows": "24"}, bad),
        ("", {"id": "a b"}, bad),
        ("", {"command": "two words"}, bad),
        ("", {"shell": "bash"}, bad),
        ("", {"id": "one"}, (409, "conflict")),
        ("", {"command": "no-such-program"}, (404, "path_not_found")),
        ("", {"session": "ghost"}, (404, "not_found")),
        ("/one/resize", {"cols": 10}, bad),
        ("/one/resize", {"cols": 10, "rows": 100_000}, bad),
        ("/ended/resize", {"cols": 10, "rows": 10}, (409, "process_ended")),
        ("/ghost/resize", {"cols": 10, "rows": 10}, (404, "not_found")),
    ):
        answer = await ask(http.post(ALL + path, json=body))
        assert (answer.status, answer.code) == expected, (path, body)
    for method in ("GET", "DELETE"):
        assert (await ask(http.request(method, f"{ALL}/ghost"))).status == 404


async def test_a_viewer_who_is_dead_is_noticed(quick: RunningServer) -> None:
    async with _client(quick) as http:
        await ask(http.put(BOX, json={}))
        await ask(http.post(ALL, json=CAT))
        terminal = await quick.state.host.sandbox("box").terminals.get("one")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.connect(quick.socket)
            lines = [f"GET {ALL}/one HTTP/1.1", "host: localhost"]
            lines += [f"{name}: {value}" for name, value in _upgrade().items()]
            dead.sendall("\r\n".join([*lines, "", ""]).encode())
            await _until(lambda: bool(terminal._output._views))
            await _until(lambda: not terminal._output._views)


async def test_a_viewer_who_lives_and_cannot_type_on_stays(quick: RunningServer) -> None:
    async with _client(quick) as http:
        await ask(http.put(BOX, json={}))
        command = ["bash", "-c", "stty raw -echo; echo begun; sleep 2; cat"]
        await ask(http.post(ALL, json={"id": "one", "command": command}))
        async with http.ws_connect(f"{ALL}/one", max_msg_size=0) as viewer:
            await _shows(viewer, b"begun")
            # The second is not read before the first is typed, and no answer to a ping either.
            await viewer.send_bytes(b"x" * (1 << 18))
            await viewer.send_bytes(b"end")
            await _shows(viewer, b"end")


async def test_a_key_opens_the_terminals_of_its_sandboxes_only(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "keyed"), host="127.0.0.1", keys=True, pool=0)
    async with (
        run_server(settings) as server,
        _client(server) as owner,
        aiohttp.ClientSession(server.url) as browser,
    ):
        made = await ask(owner.post("/api/keys", json={"name": "x", "prefix": "mine-"}))
        for id in ("mine-1", "box"):
            await ask(owner.put(f"/api/sandboxes/{id}", json={}))
        query = {"authorization": f"Bearer {made.body['key']}", "command": "cat"}
        async with browser.ws_connect("/api/sandboxes/mine-1/terminal", params=query) as viewer:
            await viewer.send_bytes(b"hello\n")
            await _shows(viewer, b"hello")
        for path, more, status in (
            (f"{BOX}/terminal", query, 403),
            (f"{ALL}/ghost", query, 403),
            ("/api/sandboxes/mine-1/terminal", {}, 401),
            # For what a page can do with headers, a key in the URL is none.
            ("/api/sandboxes/mine-1/terminals", query, 401),
        ):
            upgrade = _upgrade() if status != 401 or not more else {}
            answer = await ask(browser.get(path, params=more, headers=upgrade))
            assert answer.status == status, path


def _client(server: RunningServer) -> aiohttp.ClientSession:
    return aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(server.socket))


def _upgrade() -> dict[str, str]:
    return {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
    }


async def _shows(viewer: aiohttp.ClientWebSocketResponse, text: bytes) -> None:
    """Read until that is shown."""
    shown = b""
    async with asyncio.timeout(10):
        while text not in shown:
            frame = await viewer.receive()
            assert frame.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), (frame, shown)
            if frame.type is aiohttp.WSMsgType.BINARY:
                shown += frame.data


async def _receive(viewer: aiohttp.ClientWebSocketResponse, count: int) -> bytes:
    data = b""
    async with asyncio.timeout(10):
        while len(data) < count:
            frame = await viewer.receive()
            data += frame.data if frame.type is aiohttp.WSMsgType.BINARY else b""
    return data


async def _last_text(viewer: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    last: dict[str, Any] = {}
    async with asyncio.timeout(10):
        async for frame in viewer:
            if frame.type is aiohttp.WSMsgType.TEXT:
                last = json.loads(frame.data)
    return last


async def _close_code(viewer: aiohttp.ClientWebSocketResponse) -> int | None:
    async with asyncio.timeout(10):
        async for _ in viewer:
            pass
    return viewer.close_code


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
