"""TCP tunnels: both directions, half-closed connections, back-pressure, resets and limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.egress import tunnel as tunnel_module
from smokebox.engine.egress.tunnel import TcpTunnel, abort

if TYPE_CHECKING:
    from collections.abc import Callable


class RunningTunnel:
    """A tunnel, with the sockets of the two programs that it connects."""

    def __init__(self, count: Callable[[int], str] = lambda size: "") -> None:
        self.inside, near = tcp_pair()
        self.outside, far = tcp_pair()
        self.tunnel = TcpTunnel(near, far, count)
        self.task = asyncio.create_task(self._run(near, far))

    async def _run(self, near: socket.socket, far: socket.socket) -> str:
        try:
            return await self.tunnel.run()
        finally:
            near.close()
            far.close()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        self.inside.close()
        self.outside.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected TCP sockets; unlike Unix sockets, they can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setblocking(False)
    return one, other


async def read_all(sock: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(sock, 1 << 16):
        received += data
    return received


async def test_each_direction_ends_separately() -> None:
    loop, running = asyncio.get_running_loop(), RunningTunnel()
    async with asyncio.timeout(10):
        await loop.sock_sendall(running.inside, b"request")
        running.inside.shutdown(socket.SHUT_WR)
        assert await read_all(running.outside) == b"request"
        await loop.sock_sendall(running.outside, b"response")
        running.outside.shutdown(socket.SHUT_WR)
        assert await read_all(running.inside) == b"response"
        assert await running.task == ""
    assert (running.tunnel.sent, running.tunnel.received) == (7, 8)
    await running.close()


async def test_bytes_wait_for_a_server_that_does_not_read() -> None:
    loop, running = asyncio.get_running_loop(), RunningTunnel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await loop.sock_sendall(running.inside, bytes(256 << 20))
    assert running.tunnel.sent < 64 << 20
    await running.close()


async def test_reset_of_one_side_resets_the_other() -> None:
    running = RunningTunnel()
    abort(running.outside)
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionResetError):
            while True:
                await asyncio.get_running_loop().sock_recv(running.inside, 10)
        assert "broke" in await running.task
    await running.close()


async def test_exceeded_limit_resets_both_sides() -> None:
    loop, running = asyncio.get_running_loop(), RunningTunnel(lambda size: "max_bytes=1 is reached")
    async with asyncio.timeout(10):
        await loop.sock_sendall(running.inside, b"too much")
        assert await running.task == "max_bytes=1 is reached"
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(running.outside, 10)
    await running.close()


async def test_silent_half_closed_tunnel_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_module, "HALF_CLOSED_SECONDS", 0.05)
    running = RunningTunnel()
    running.inside.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(10):
        assert await running.task == "one side has ended, and the other is silent"
    await running.close()


async def test_active_half_closed_tunnel_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_module, "HALF_CLOSED_SECONDS", 1.0)
    loop, running = asyncio.get_running_loop(), RunningTunnel()
    running.inside.shutdown(socket.SHUT_WR)
    for _ in range(6):
        await asyncio.sleep(0.25)
        await loop.sock_sendall(running.outside, b"more")
    running.outside.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(10):
        assert await running.task == ""
    assert running.tunnel.received == 24
    await running.close()
