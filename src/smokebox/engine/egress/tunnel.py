"""Tunnels: bytes copied between a sandbox and a server, unread, with back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# How long one side may say nothing after the other has ended: a process that was killed ends
# as one does that waits for an answer.
HALF_SECONDS = 120.0

_SIZE = 64 * 1024
_ABORT = struct.pack("ii", 1, 0)


class Tunnel:
    """A connection of the sandbox, joined to one of ours. `sent` and `received` are what the
    sandbox did. `count` is told of each piece, and ends both by giving a reason.
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
        """Pass bytes until both sides have ended; the reason why that was too soon, or nothing."""
        up = asyncio.create_task(self._pass(self._inside, self._outside))
        down = asyncio.create_task(self._pass(self._outside, self._inside))
        try:
            ended, left = await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            while left and not any(_fault(task) for task in ended):
                before = self.sent + self.received
                ended, left = await asyncio.wait({up, down}, timeout=HALF_SECONDS)
                if left and before == self.sent + self.received:
                    raise _Cut("one side has ended, and the other says nothing")
            reason = next((why for task in ended if (why := _fault(task))), "")
        except _Cut as error:
            reason = str(error)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.wait({up, down})
        if reason:
            # Half of what was meant must not look like all of it.
            abort(self._inside)
            abort(self._outside)
        return reason

    async def _pass(self, source: socket.socket, target: socket.socket) -> None:
        loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(_SIZE))
        while size := await loop.sock_recv_into(source, buffer):
            if source is self._inside:
                self.sent += size
            else:
                self.received += size
            if reason := self._count(size):
                raise _Cut(reason)
            await loop.sock_sendall(target, buffer[:size])
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class _Cut(Exception):
    """Why it is not to go on."""


def abort(sock: socket.socket) -> None:
    """Close a connection so that the other side sees that it was cut."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    sock.close()


def _fault(task: asyncio.Task[None]) -> str:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return ""
    return str(error) if isinstance(error, _Cut) else f"the connection broke: {error}"
