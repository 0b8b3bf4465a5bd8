"""Terminals over HTTP and WebSockets."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from http_response import fetch
from server.boxes import eventually
from smokebox.server import websocket
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.frames import LARGEST_FRAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.server.server import RunningServer

SANDBOX = "/api/sandboxes/box"
TERMINALS = f"{SANDBOX}/terminals"
CAT = {"id": "one", "command": ["bash", "-c", "stty raw -echo; echo started; cat"]}


@pytest_asyncio.fixture(autouse=True)
async def _sandbox(http: aiohttp.ClientSession) -> None:
    assert (await fetch(http.put(SANDBOX, json={}))).status == 200


@pytest_asyncio.fixture
async def short_keepalive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningServer]:
    """A server with a short WebSocket keepalive."""
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.2)
    monkeypatch.setattr(websocket, "PONG_SECONDS", 0.2)
    async with run_server(ServerSettings(home=str(tmp_path / "home2"), pool=0)) as server:
        yield server


async def test_terminal_is_opened_listed_and_closed(http: aiohttp.ClientSession) -> None:
    body = {"id": "one", "command": ["sleep", "60"], "cols": 100, "rows": 30}
    created = await fetch(http.post(TERMINALS, json=body))
    assert created.status == 201
    assert {**created.body, "created_at": 0} == {
        "id": "one",
        "command": "sleep 60",
        "cols": 100,
        "rows": 30,
        "created_at": 0,
        "exit_code": None,
    }
    assert (await fetch(http.get(f"{TERMINALS}/one"))).body == created.body
    assert (await fetch(http.get(TERMINALS))).body == {"terminals": [created.body]}
    assert (await fetch(http.delete(f"{TERMINALS}/one"))).status == 204
    assert (await fetch(http.get(f"{TERMINALS}/one"))).status == 404


async def test_input_and_output(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(TERMINALS, json={"id": "one"}))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await viewer.send_bytes(b"echo $((6 * 7))\n")
        await _read_until(viewer, b"\r42\r\n")
        await viewer.send_bytes(b"exit 3\n")
        assert await _last_text(viewer) == {"type": "exit", "code": 3}
        assert viewer.close_code == 1000
    assert (await fetch(http.get(f"{TERMINALS}/one"))).body["exit_code"] == 3


async def test_later_viewer_gets_earlier_output_and_then_ready(
    http: aiohttp.ClientSession,
) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    async with http.ws_connect(f"{TERMINALS}/one") as first:
        await _read_until(first, b"started")
        await first.send_bytes(b"before")
        await _read_until(first, b"before")
        async with http.ws_connect(f"{TERMINALS}/one") as second:
            assert (await second.receive_bytes()).endswith(b"before")
            assert await second.receive_json() == {"type": "ready"}
            await second.send_bytes(b"after")
            await _read_until(first, b"after")
            await _read_until(second, b"after")


async def test_ended_terminal_can_be_viewed(http: aiohttp.ClientSession) -> None:
    await fetch(
        http.post(TERMINALS, json={"id": "one", "command": ["bash", "-c", "echo output; exit 7"]})
    )
    for _ in range(2):
        async with http.ws_connect(f"{TERMINALS}/one") as viewer:
            frames = [frame async for frame in viewer]
        # The first viewer may attach before the program has written.
        text = [json.loads(frame.data) for frame in frames if frame.type is aiohttp.WSMsgType.TEXT]
        data = [frame.data for frame in frames if frame.type is aiohttp.WSMsgType.BINARY]
        assert (b"".join(data), text) == (
            b"output\r\n",
            [{"type": "ready"}, {"type": "exit", "code": 7}],
        )
    assert frames[0].type is aiohttp.WSMsgType.BINARY


async def test_resize(http: aiohttp.ClientSession) -> None:
    command = ["bash", "-c", "echo started; while stty size; do sleep 0.05; done"]
    await fetch(http.post(TERMINALS, json={"id": "one", "command": command}))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await _read_until(viewer, b"started")
        await viewer.send_json({"type": "resize", "cols": 90, "rows": 31})
        await _read_until(viewer, b"31 90")
        resized = await fetch(http.post(f"{TERMINALS}/one/resize", json={"cols": 91, "rows": 32}))
        await _read_until(viewer, b"32 91")
    assert (resized.body["cols"], resized.body["rows"]) == (91, 32)


async def test_bytes_are_passed_unchanged_in_both_directions(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    data = os.urandom(1 << 19)
    async with http.ws_connect(f"{TERMINALS}/one", max_msg_size=0) as viewer:
        await _read_until(viewer, b"started\n")
        sending = asyncio.create_task(viewer.send_bytes(data))
        assert await _receive(viewer, len(data)) == data
        await sending


async def test_invalid_frames_get_an_error_frame(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await _read_until(viewer, b"started")
        await viewer.send_bytes(b"typed")
        await _read_until(viewer, b"typed")
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
            error = await viewer.receive_json()
            assert (error["type"], error["code"]) == ("error", "invalid_option"), text
            assert error["message"]
        await viewer.send_bytes(b"still open")
        await _read_until(viewer, b"still open")


async def test_too_long_and_undecodable_frames_close_the_socket(
    http: aiohttp.ClientSession, capfd: pytest.CaptureFixture[str]
) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        # Only the frame header: a client that is still sending does not read the close frame.
        assert viewer._response.connection is not None
        assert viewer._response.connection.transport is not None
        head = struct.pack("!BBQI", 0x82, 0xFF, LARGEST_FRAME + 1, 0)
        viewer._response.connection.transport.write(head)
        assert await _close_code(viewer) == 1009
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await viewer._writer.send_frame(b"\xff\xfe", aiohttp.WSMsgType.TEXT)
        assert await _close_code(viewer) == 1007
    assert (await fetch(http.get(f"{TERMINALS}/one"))).body["exit_code"] is None
    assert "Traceback" not in capfd.readouterr().err


async def test_undecodable_frame_during_output_closes_the_socket(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    await fetch(http.post(TERMINALS, json={"id": "one", "command": ["yes"]}))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await _read_until(viewer, b"y\r\n" * 100)
        await viewer._writer.send_frame(b"\xff\xfe", aiohttp.WSMsgType.TEXT)
        assert await _close_code(viewer) == 1007
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_program_that_does_not_read_applies_backpressure(
    short_keepalive: RunningServer,
) -> None:
    async with _client(short_keepalive) as http:
        await fetch(http.put(SANDBOX, json={}))
        command = ["bash", "-c", "stty raw -echo; echo started; sleep 60"]
        await fetch(http.post(TERMINALS, json={"id": "one", "command": command}))
        async with http.ws_connect(f"{TERMINALS}/one") as viewer:
            await _read_until(viewer, b"started")
            sent = 0
            with pytest.raises(TimeoutError):
                while sent < 64 << 20:
                    async with asyncio.timeout(1):
                        await viewer.send_bytes(bytes(1 << 16))
                    sent += 1 << 16
            # Only what the buffers of two sockets hold.
            assert sent < 16 << 20
            assert viewer._response.connection is not None
            assert viewer._response.connection.transport is not None
            viewer._response.connection.transport.abort()
        # Nothing is read from the socket, and yet its end is detected.
        await eventually(lambda: not short_keepalive.state.drain.requests)


async def test_closing_a_terminal_closes_its_sockets(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await _read_until(viewer, b"started")
        assert (await fetch(http.delete(f"{TERMINALS}/one"))).status == 204
        assert (await _last_text(viewer))["type"] == "exit"
        assert viewer.close_code == 1000


async def test_destroyed_sandbox_ends_viewers_with_an_error(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await _read_until(viewer, b"started")
        assert (await fetch(http.delete(SANDBOX))).status == 204
        error = await _last_text(viewer)
        assert (error["type"], error["code"]) == ("error", "sandbox_gone")
        assert viewer.close_code == 1008


async def test_disconnect_removes_the_viewer(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    async with http.ws_connect(f"{TERMINALS}/one") as viewer:
        await _read_until(viewer, b"started")
    terminal = await server.state.host.sandbox("box").terminals.get("one")
    await eventually(lambda: not terminal._output._views)
    assert terminal.running


async def test_terminal_of_a_socket_closes_with_it(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    await fetch(http.post(f"{SANDBOX}/sessions", json={"id": "s", "env": {"A": "from session"}}))
    query = {"cols": "90", "rows": "31", "session": "s", "command": "bash", "cwd": "/tmp"}
    async with http.ws_connect(f"{SANDBOX}/terminal", params=query) as viewer:
        await viewer.send_bytes(b"echo $PWD $A $(stty size)\n")
        await _read_until(viewer, b"\r/tmp from session 31 90\r\n")
        assert len((await fetch(http.get(TERMINALS))).body["terminals"]) == 1
    await eventually(lambda: not server.state.host.sandbox("box").terminals._known)
    async with http.ws_connect(f"{SANDBOX}/terminal") as viewer:
        await viewer.send_bytes(b"exit 5\n")
        assert await _last_text(viewer) == {"type": "exit", "code": 5}
    await eventually(lambda: not server.state.host.sandbox("box").terminals._known)


async def test_invalid_sockets_are_refused_with_an_http_status(http: aiohttp.ClientSession) -> None:
    for path, expected in (
        ("/api/sandboxes/ghost/terminals/one", (404, "not_found")),
        ("/api/sandboxes/ghost/terminal", (404, "not_found")),
        (f"{TERMINALS}/ghost", (404, "not_found")),
        (f"{SANDBOX}/terminal?cols=0", (400, "invalid_option")),
        (f"{SANDBOX}/terminal?cols=x", (400, "invalid_option")),
        (f"{SANDBOX}/terminal?shell=bash", (400, "invalid_option")),
        (f"{SANDBOX}/terminal?session=ghost", (404, "not_found")),
        (f"{SANDBOX}/terminal?command=no-such-program", (404, "path_not_found")),
        (f"{SANDBOX}/nothing", (404, "not_found")),
    ):
        response = await fetch(http.get(path, headers=_upgrade()))
        assert (response.status, response.code) == expected, path
    assert (await fetch(http.get(TERMINALS))).body == {"terminals": []}


async def test_invalid_requests_are_refused(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(TERMINALS, json=CAT))
    ended = {"id": "ended", "command": ["true"]}
    await fetch(http.post(TERMINALS, json=ended))
    async with http.ws_connect(f"{TERMINALS}/ended") as viewer:
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
        response = await fetch(http.post(TERMINALS + path, json=body))
        assert (response.status, response.code) == expected, (path, body)
    for method in ("GET", "DELETE"):
        assert (await fetch(http.request(method, f"{TERMINALS}/ghost"))).status == 404


async def test_unresponsive_viewer_is_removed(short_keepalive: RunningServer) -> None:
    async with _client(short_keepalive) as http:
        await fetch(http.put(SANDBOX, json={}))
        await fetch(http.post(TERMINALS, json=CAT))
        terminal = await short_keepalive.state.host.sandbox("box").terminals.get("one")
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(short_keepalive.socket)
            lines = [f"GET {TERMINALS}/one HTTP/1.1", "host: localhost"]
            lines += [f"{name}: {value}" for name, value in _upgrade().items()]
            silent.sendall("\r\n".join([*lines, "", ""]).encode())
            await eventually(lambda: bool(terminal._output._views))
            await eventually(lambda: not terminal._output._views)


async def test_viewer_whose_input_is_paused_stays_connected(short_keepalive: RunningServer) -> None:
    async with _client(short_keepalive) as http:
        await fetch(http.put(SANDBOX, json={}))
        command = ["bash", "-c", "stty raw -echo; echo started; sleep 2; cat"]
        await fetch(http.post(TERMINALS, json={"id": "one", "command": command}))
        async with http.ws_connect(f"{TERMINALS}/one", max_msg_size=0) as viewer:
            await _read_until(viewer, b"started")
            # The second frame, and the pong, are not read until the first frame is written.
            await viewer.send_bytes(b"x" * (1 << 18))
            await viewer.send_bytes(b"end")
            await _read_until(viewer, b"end")


async def test_key_with_a_prefix_is_limited_to_its_terminals(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "keyed"), host="127.0.0.1", keys=True, pool=0)
    async with (
        run_server(settings) as server,
        _client(server) as owner,
        aiohttp.ClientSession(server.url) as browser,
    ):
        key = await fetch(owner.post("/api/keys", json={"name": "x", "prefix": "mine-"}))
        for id in ("mine-1", "box"):
            await fetch(owner.put(f"/api/sandboxes/{id}", json={}))
        query = {"authorization": f"Bearer {key.body['key']}", "command": "cat"}
        async with browser.ws_connect("/api/sandboxes/mine-1/terminal", params=query) as viewer:
            await viewer.send_bytes(b"hello\n")
            await _read_until(viewer, b"hello")
        for path, params, status in (
            (f"{SANDBOX}/terminal", query, 403),
            (f"{TERMINALS}/ghost", query, 403),
            ("/api/sandboxes/mine-1/terminal", {}, 401),
            # Only WebSockets accept a key in the URL.
            ("/api/sandboxes/mine-1/terminals", query, 401),
        ):
            upgrade = _upgrade() if status != 401 or not params else {}
            response = await fetch(browser.get(path, params=params, headers=upgrade))
            assert response.status == status, path


def _client(server: RunningServer) -> aiohttp.ClientSession:
    return aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(server.socket))


def _upgrade() -> dict[str, str]:
    return {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
    }


async def _read_until(viewer: aiohttp.ClientWebSocketResponse, text: bytes) -> None:
    """Read output until it contains `text`."""
    output = b""
    async with asyncio.timeout(10):
        while text not in output:
            frame = await viewer.receive()
            assert frame.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), (frame, output)
            if frame.type is aiohttp.WSMsgType.BINARY:
                output += frame.data


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
