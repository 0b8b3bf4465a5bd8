"""Terminals over the bridge protocol, by plain WebSocket."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.compat.bridge_client import Bridge
    from smokebox.server.server import RunningServer


class Screen:
    """The client's end of a terminal."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.shown = b""
        self.said: list[dict[str, Any]] = []

    async def see(self, text: bytes) -> None:
        """Read until the text is shown."""
        async with asyncio.timeout(15):
            while text not in self.shown:
                assert await self.read(), self.shown

    async def read(self) -> bool:
        """Take one frame; False for the last."""
        message = await self.socket.receive()
        if message.type == aiohttp.WSMsgType.BINARY:
            self.shown += message.data
        elif message.type == aiohttp.WSMsgType.TEXT:
            self.said.append(json.loads(message.data))
        else:
            return False
        return True

    async def to_the_end(self) -> None:
        """Read until the server closes."""
        async with asyncio.timeout(15):
            while await self.read():
                pass

    async def type(self, text: str) -> None:
        """Type."""
        await self.socket.send_bytes(text.encode())


@asynccontextmanager
async def terminal(bridge: Bridge, **query: Any) -> AsyncIterator[Screen]:
    path = f"/v1/sandbox/{bridge.id}/pty"
    async with bridge.http.ws_connect(path, params=query) as socket:
        screen = Screen(socket)
        first = await socket.receive(timeout=15)
        assert (first.type, json.loads(first.data)) == (aiohttp.WSMsgType.TEXT, {"type": "ready"})
        yield screen


async def test_a_command_runs_and_its_end_is_told(bridge: Bridge) -> None:
    async with terminal(bridge) as screen:
        await screen.type("tty; pwd; echo $((6*7))\n")
        await screen.see(b"/workspace\r\n42\r\n")
        await screen.type("exit 3\n")
        await screen.to_the_end()
        assert screen.said == [{"type": "exit", "code": 3}]
        assert screen.socket.close_code == 1000


async def test_what_is_typed_after_ready_shows_once(bridge: Bridge) -> None:
    async with terminal(bridge) as screen:
        await screen.type(f"echo {'x' * 6000} | wc -c; echo do''ne\n")
        await screen.see(b"6001\r\ndone\r\n")
        assert screen.shown.count(b"echo xx") == 1


async def test_the_size_is_as_asked_and_changes(bridge: Bridge) -> None:
    async with terminal(bridge, cols=100, rows=40) as screen:
        await screen.type("stty size\n")
        await screen.see(b"40 100\r\n")
        for frame in ("nonsense", "[]", '{"type":"resize"}', '{"type":"resize","cols":0,"rows":1}'):
            await screen.socket.send_str(frame)
        await screen.socket.send_json({"type": "resize", "cols": 50, "rows": 20})
        await screen.type("stty size\n")
        await screen.see(b"20 50\r\n")


async def test_another_shell_and_a_program(bridge: Bridge) -> None:
    async with terminal(bridge, shell="/bin/sh") as screen:
        await screen.type("echo $0\n")
        await screen.see(b"/bin/sh\r\n")
    async with terminal(bridge, shell="cat") as screen:
        await screen.type("quiet\n")
        await screen.see(b"quiet\r\nquiet\r\n")
        await screen.type("\x04")
        await screen.to_the_end()
        assert screen.said == [{"type": "exit", "code": 0}]


async def test_sockets_without_a_session_have_each_their_own(bridge: Bridge) -> None:
    async with terminal(bridge) as one, terminal(bridge) as two:
        await one.type("A=1; echo a${A}a\n")
        await two.type("echo b${A}b\n")
        await one.see(b"a1a\r\n")
        await two.see(b"bb\r\n")


async def test_who_leaves_ends_the_terminal(bridge: Bridge, server: RunningServer) -> None:
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


async def test_one_who_leaves_is_noticed_while_the_program_does_not_read(
    bridge: Bridge, server: RunningServer
) -> None:
    sandbox = server.state.host.sandbox("box")
    async with terminal(bridge) as screen:
        await screen.type("stty raw -echo; echo o''n; exec sleep 1717\n")
        await screen.see(b"on")
        for _ in range(20):
            await screen.type("x" * 10_000)
    async with asyncio.timeout(10):
        while await sandbox.terminals.list():
            await asyncio.sleep(0.02)


async def test_a_terminal_of_a_session_stays_and_is_shown_again(bridge: Bridge) -> None:
    await bridge.out("export", "WORD=told", session="work")
    async with terminal(bridge, session="work") as screen:
        await screen.type("here=kept; echo $WORD\n")
        await screen.see(b"told\r\n")
    async with terminal(bridge, session="work") as screen:
        await screen.see(b"told\r\n")
        await screen.type("echo a${here}a\n")
        await screen.see(b"akepta\r\n")
        await screen.type("exit\n")
        await screen.to_the_end()
    async with terminal(bridge, session="work") as screen:
        await screen.type("echo a${here}a\n")
        await screen.see(b"aa\r\n")
        await bridge.ask("DELETE", "/session/work")
        await screen.to_the_end()


async def test_a_terminal_in_a_sandbox_that_goes_says_so(
    bridge: Bridge, server: RunningServer
) -> None:
    async with terminal(bridge) as screen:
        await server.state.host.sandbox("box").destroy()
        await screen.to_the_end()
        assert screen.said[-1]["type"] == "error"
        assert "stopped" in screen.said[-1]["message"]


async def test_without_a_websocket_it_is_refused(bridge: Bridge) -> None:
    answer = await bridge.refused("GET", "/pty")
    assert answer == (400, "invalid_request", "WebSocket upgrade required")


async def test_what_cannot_be_is_refused_before_the_upgrade(bridge: Bridge) -> None:
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


async def test_one_who_leaves_while_output_waits_for_them_ends_the_terminal(
    bridge: Bridge, server: RunningServer
) -> None:
    sandbox = server.state.host.sandbox("box")
    async with terminal(bridge) as screen:
        await screen.type("yes\n")
        await screen.see(b"y\r\ny\r\n" * 1000)
    async with asyncio.timeout(10):
        while await sandbox.terminals.list():
            await asyncio.sleep(0.02)
