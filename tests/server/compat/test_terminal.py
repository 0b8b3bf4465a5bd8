"""Terminals over the bridge protocol."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.compat.bridge_client import BridgeClient
    from smokebox.server.server import RunningServer


class Screen:
    """The client's end of a terminal."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.output = b""
        self.messages: list[dict[str, Any]] = []

    async def read_until(self, text: bytes) -> None:
        """Read until the output contains `text`."""
        async with asyncio.timeout(15):
            while text not in self.output:
                assert await self.read(), self.output

    async def read(self) -> bool:
        """Read one frame; False at the end."""
        message = await self.socket.receive()
        if message.type == aiohttp.WSMsgType.BINARY:
            self.output += message.data
        elif message.type == aiohttp.WSMsgType.TEXT:
            self.messages.append(json.loads(message.data))
        else:
            return False
        return True

    async def read_all(self) -> None:
        """Read until the server closes the socket."""
        async with asyncio.timeout(15):
            while await self.read():
                pass

    async def type(self, text: str) -> None:
        """Send input."""
        await self.socket.send_bytes(text.encode())


@asynccontextmanager
async def terminal(bridge: BridgeClient, **query: Any) -> AsyncIterator[Screen]:
    path = f"/v1/sandbox/{bridge.id}/pty"
    async with bridge.http.ws_connect(path, params=query) as socket:
        screen = Screen(socket)
        first = await socket.receive(timeout=15)
        assert (first.type, json.loads(first.data)) == (aiohttp.WSMsgType.TEXT, {"type": "ready"})
        yield screen


async def test_command_runs_and_its_exit_code_is_sent(bridge: BridgeClient) -> None:
    async with terminal(bridge) as screen:
        await screen.type("tty; pwd; echo $((6*7))\n")
        await screen.read_until(b"/workspace\r\n42\r\n")
        await screen.type("exit 3\n")
        await screen.read_all()
        assert screen.messages == [{"type": "exit", "code": 3}]
        assert screen.socket.close_code == 1000


async def test_input_after_ready_is_echoed_once(bridge: BridgeClient) -> None:
    async with terminal(bridge) as screen:
        await screen.type(f"echo {'x' * 6000} | wc -c; echo do''ne\n")
        await screen.read_until(b"6001\r\ndone\r\n")
        assert screen.output.count(b"echo xx") == 1


async def test_initial_size_and_resize(bridge: BridgeClient) -> None:
    async with terminal(bridge, cols=100, rows=40) as screen:
        await screen.type("stty size\n")
        await screen.read_until(b"40 100\r\n")
        for frame in ("nonsense", "[]", '{"type":"resize"}', '{"type":"resize","cols":0,"rows":1}'):
            await screen.socket.send_str(frame)
        await screen.socket.send_json({"type": "resize", "cols": 50, "rows": 20})
        await screen.type("stty size\n")
        await screen.read_until(b"20 50\r\n")


async def test_shell_option(bridge: BridgeClient) -> None:
    async with terminal(bridge, shell="/bin/sh") as screen:
        await screen.type("echo $0\n")
        await screen.read_until(b"/bin/sh\r\n")
    async with terminal(bridge, shell="cat") as screen:
        await screen.type("quiet\n")
        await screen.read_until(b"quiet\r\nquiet\r\n")
        await screen.type("\x04")
        await screen.read_all()
        assert screen.messages == [{"type": "exit", "code": 0}]


async def test_sockets_without_a_session_have_separate_terminals(bridge: BridgeClient) -> None:
    async with terminal(bridge) as one, terminal(bridge) as two:
        await one.type("A=1; echo a${A}a\n")
        await two.type("echo b${A}b\n")
        await one.read_until(b"a1a\r\n")
        await two.read_until(b"bb\r\n")


async def test_disconnect_closes_the_terminal(bridge: BridgeClient, server: RunningServer) -> None:
    sandbox = server.state.host.sandbox("box")
    async with terminal(bridge) as screen:
        await screen.type("sleep 1616\n")
        async with asyncio.timeout(10):
            while not (await sandbox.exec(["pgrep", "-xf", "sleep 1616"])).success:
                await asyncio.sleep(0.02)
    async with asyncio.timeout(10):
        while (await sandbox.exec(["pgrep", "-xf", "sleep 1616"])).success:
            await asyncio.sleep(0.02)
        while await sandbox.terminals.list():
            await asyncio.sleep(0.02)


async def test_disconnect_is_detected_while_the_program_does_not_read(
    bridge: BridgeClient, server: RunningServer
) -> None:
    sandbox = server.state.host.sandbox("box")
    async with terminal(bridge) as screen:
        await screen.type("stty raw -echo; echo o''n; exec sleep 1717\n")
        await screen.read_until(b"on")
        for _ in range(20):
            await screen.type("x" * 10_000)
    async with asyncio.timeout(10):
        while await sandbox.terminals.list():
            await asyncio.sleep(0.02)


async def test_terminal_of_a_session_stays_open_and_replays_output(bridge: BridgeClient) -> None:
    await bridge.output("export", "WORD=exported", session="work")
    async with terminal(bridge, session="work") as screen:
        await screen.type("here=kept; echo $WORD\n")
        await screen.read_until(b"exported\r\n")
    async with terminal(bridge, session="work") as screen:
        await screen.read_until(b"exported\r\n")
        await screen.type("echo a${here}a\n")
        await screen.read_until(b"akepta\r\n")
        await screen.type("exit\n")
        await screen.read_all()
    async with terminal(bridge, session="work") as screen:
        await screen.type("echo a${here}a\n")
        await screen.read_until(b"aa\r\n")
        await bridge.request("DELETE", "/session/work")
        await screen.read_all()


async def test_destroyed_sandbox_ends_the_terminal_with_an_error(
    bridge: BridgeClient, server: RunningServer
) -> None:
    async with terminal(bridge) as screen:
        await server.state.host.sandbox("box").destroy()
        await screen.read_all()
        assert screen.messages[-1]["type"] == "error"
        assert "stopped" in screen.messages[-1]["message"]


async def test_plain_http_is_refused(bridge: BridgeClient) -> None:
    response = await bridge.request_error("GET", "/pty")
    assert response == (400, "invalid_request", "WebSocket upgrade required")


async def test_invalid_options_are_refused_before_the_upgrade(bridge: BridgeClient) -> None:
    for query, status in (
        ({"cols": "abc"}, 400),
        ({"rows": "NaN"}, 400),
        ({"cols": "inf"}, 400),
        ({"cols": "0"}, 400),
        ({"rows": "1000000"}, 400),
        ({"session": "a..b"}, 400),
        ({"shell": "no-such-shell"}, 502),
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await bridge.http.ws_connect("/v1/sandbox/box/pty", params=query)
        assert (query, caught.value.status) == (query, status)


async def test_disconnect_with_unread_output_closes_the_terminal(
    bridge: BridgeClient, server: RunningServer
) -> None:
    sandbox = server.state.host.sandbox("box")
    async with terminal(bridge) as screen:
        await screen.type("yes\n")
        await screen.read_until(b"y\r\ny\r\n" * 1000)
    async with asyncio.timeout(10):
        while await sandbox.terminals.list():
            await asyncio.sleep(0.02)
