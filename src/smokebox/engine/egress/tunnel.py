"""Tunnels: bytes copied between a sandbox and a server, unread, with back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING

from smokebox.foundation.loop_shares import pause

if TYPE_CHECKING:
    from collections.abc import Callable

# Maximum silence of one side after the other has ended. A half-closed connection may be one that
# waits for a response, or one whose process was killed.
HALF_CLOSED_SECONDS = 120.0

_SIZE = 64 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpTunnel:
    """A connection of the sandbox, joined to one of ours.

    `sent` and `received` count the bytes of the sandbox. `count` is called with the size of each
    piece, and ends the tunnel by returning a reason.
    """

    def __init__(
        self, inside: socket.socket, outside: socket.socket, count: Callable[[int], str]
    ) -> None:
        self.sent = 0
        self.received = 0
        self._inside = inside
        self._outside = outside
        self._count = count

    async def run(self) -> str:
        """Copy bytes until both sides have ended; return the reason if they ended too early."""
        up = asyncio.create_task(self._copy(self._inside, self._outside))
        down = asyncio.create_task(self._copy(self._outside, self._inside))
        try:
            ended, left = await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            while left and not any(_fault(task) for task in ended):
                before = self.sent + self.received
                ended, left = await asyncio.wait({up, down}, timeout=HALF_CLOSED_SECONDS)
                if left and before == self.sent + self.received:
                    raise _TunnelEnded("one side has ended, and the other is silent")
            reason = next((why for task in ended if (why := _fault(task))), "")
        except _TunnelEnded as error:
            reason = str(error)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.wait({up, down})
        if reason:
            # Reset both: a truncated stream must not look complete.
            abort(self._inside)
            abort(self._outside)
        return reason

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(_SIZE))
        while size := await loop.sock_recv_into(source, buffer):
            if source is self._inside:
                self.sent += size
            else:
                self.received += size
            if reason := self._count(size):
                raise _TunnelEnded(reason)
            await loop.sock_sendall(target, buffer[:size])
            await pause()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class _TunnelEnded(Exception):
    """The reason to end a tunnel."""


def abort(sock: socket.socket) -> None:
    """Reset a connection, so that the peer can tell that it was cut."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()


def _fault(task: asyncio.Task[None]) -> str:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, _TunnelEnded) else f"the connection broke: {error}"
