"""Bytes that pass unread: all of them, in order, no faster than they are taken."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.egress import tunnel as module
from smokebox.engine.egress.tunnel import TcpTunnel, abort

if TYPE_CHECKING:
    from collections.abc import Callable


class Ends:
    """A tunnel, and the two who talk through it."""

    def __init__(self, count: Callable[[int], str] = lambda size: "") -> None:
        self.inside, near = _pair()
        self.outside, far = _pair()
        self.tunnel = TcpTunnel(near, far, count)
        self.running = asyncio.create_task(self._run(near, far))

    async def _run(self, near: socket.socket, far: socket.socket) -> str:
        try:
            return await self.tunnel.run()
        finally:
            near.close()
            far.close()

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})
        self.inside.close()
        self.outside.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of TCP, which is what knows of cuts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setblocking(False)
    return one, other


async def read_all(sock: socket.socket) -> bytes:
    loop, found = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(sock, 1 << 16):
        found += data
    return found


async def test_bytes_pass_both_ways_and_each_half_ends_by_itself() -> None:
    loop, ends = asyncio.get_running_loop(), Ends()
    async with asyncio.timeout(10):
        await loop.sock_sendall(ends.inside, b"question")
        ends.inside.shutdown(socket.SHUT_WR)
        assert await read_all(ends.outside) == b"question"
        await loop.sock_sendall(ends.outside, b"late answer")
        ends.outside.shutdown(socket.SHUT_WR)
        assert await read_all(ends.inside) == b"late answer"
        assert await ends.running == ""
    assert (ends.tunnel.sent, ends.tunnel.received) == (8, 11)
    await ends.close()


async def test_who_does_not_read_is_not_sent_more_than_buffers_hold() -> None:
    loop, ends = asyncio.get_running_loop(), Ends()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await loop.sock_sendall(ends.inside, bytes(256 << 20))
    assert ends.tunnel.sent < 64 << 20
    await ends.close()


async def test_a_cut_on_one_side_is_a_cut_on_the_other() -> None:
    ends = Ends()
    abort(ends.outside)
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionResetError):
            while True:
                await asyncio.get_running_loop().sock_recv(ends.inside, 10)
        assert "broke" in await ends.running
    await ends.close()


async def test_too_many_bytes_end_it_on_both_sides() -> None:
    loop, ends = asyncio.get_running_loop(), Ends(lambda size: "max_bytes=1 is reached")
    async with asyncio.timeout(10):
        await loop.sock_sendall(ends.inside, b"too much")
        assert await ends.running == "max_bytes=1 is reached"
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(ends.outside, 10)
    await ends.close()


async def test_half_a_tunnel_that_is_silent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HALF_CLOSED_SECONDS", 0.05)
    ends = Ends()
    ends.inside.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(10):
        assert await ends.running == "one side has ended, and the other is silent"
    await ends.close()


async def test_half_a_tunnel_that_talks_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HALF_CLOSED_SECONDS", 1.0)
    loop, ends = asyncio.get_running_loop(), Ends()
    ends.inside.shutdown(socket.SHUT_WR)
    for _ in range(6):
        await asyncio.sleep(0.25)
        await loop.sock_sendall(ends.outside, b"more")
    ends.outside.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(10):
        assert await ends.running == ""
    assert ends.tunnel.received == 24
    await ends.close()
