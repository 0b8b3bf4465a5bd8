"""One end of a connection: bytes that came and are not read yet, and bytes to be sent."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

from smokebox.engine.egress.http.head import MOST_HEAD, Malformed

if TYPE_CHECKING:
    from collections.abc import Callable

# Above this, no more is read until some was taken; the peer's own buffers fill, and it waits.
_FULL = 128 * 1024
_AT_ONCE = struct.pack("ii", 1, 0)


class Cut(ConnectionError):
    """The other side went away before all was said."""


class Wire(asyncio.Protocol):
    """Reads as far as it is asked to, and says when the other side has gone.

    `patience` bounds how long one wait for the other side may take, either way. `lost` is
    called when it left, and `left` says that it was.
    """

    def __init__(self, *, patience: float, lost: Callable[[], object] | None = None) -> None:
        self.patience = patience
        self.lost = lost
        self.ended = False
        self.left = False
        self.error: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        # What came, and how much of it was read: cutting it off each time would cost more.
        self._buffer = b""
        self._start = 0
        self._held = False
        self._full = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio: it stands."""
        # Those of uvloop do not say that they are transports.
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Of asyncio: some came."""
        self._buffer = self._buffer[self._start :] + data if self.waiting else data
        self._start = 0
        if len(self._buffer) > _FULL and not self._held and self._transport is not None:
            self._held = True
            self._transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> bool:
        """Of asyncio: no more will come. Who stops sending has left, as for other proxies."""
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio: it is gone."""
        self.error = exc
        self._end()

    def pause_writing(self) -> None:
        """Of asyncio: the other side does not keep up."""
        self._full = True

    def resume_writing(self) -> None:
        """Of asyncio: it caught up."""
        self._full = False
        _wake(self._writer)

    @property
    def transport(self) -> asyncio.Transport:
        """What asyncio moves bytes with."""
        assert self._transport is not None
        return self._transport

    @property
    def waiting(self) -> int:
        """How many bytes came that were not read."""
        return len(self._buffer) - self._start

    @property
    def has_line(self) -> bool:
        """Whether a whole line came."""
        return self._buffer.find(b"\n", self._start) >= 0

    async def head(self) -> bytes | None:
        """All bytes up to an empty line, with it; None where the other side left before."""
        while (end := self._buffer.find(b"\r\n\r\n", self._start)) < 0:
            if self.waiting > MOST_HEAD:
                break
            if self._buffer.count(b"\n", self._start) != self._buffer.count(b"\r\n", self._start):
                raise Malformed("a line ends without a carriage return")
            if self.ended:
                return None
            await self._more()
        if not 0 <= end - self._start <= MOST_HEAD:
            raise Malformed(f"the head is longer than {MOST_HEAD} bytes", 431)
        return self.take(end + 4 - self._start)

    async def line(self, limit: int) -> bytes:
        """The bytes up to the next CRLF, without it."""
        while (end := self._buffer.find(b"\n", self._start)) < 0:
            if self.waiting > limit:
                raise Malformed(f"a line is longer than {limit} bytes")
            await self._needed()
        taken = self.take(end + 1 - self._start)
        if len(taken) > limit or not taken.endswith(b"\r\n"):
            raise Malformed("a line does not end as it should")
        return taken[:-2]

    async def some(self, limit: int) -> bytes:
        """At least one byte, and at most `limit`; nothing where the other side left."""
        while not self.waiting:
            if self.ended:
                return b""
            await self._more()
        return self.take(limit)

    async def exactly(self, size: int) -> bytes:
        """That many bytes."""
        while self.waiting < size:
            await self._needed()
        return self.take(size)

    def take(self, limit: int) -> bytes:
        """What is here already, at most `limit` bytes."""
        if limit >= self.waiting:
            taken = self._buffer[self._start :]
            self._buffer, self._start = b"", 0
        else:
            taken = self._buffer[self._start : self._start + limit]
            self._start += limit
        if self._held and self.waiting <= _FULL:
            self._held = False
            if not self.ended:
                self.transport.resume_reading()
        return taken

    def write(self, data: bytes) -> None:
        """Send, or keep for sending; `drain` waits while too much is kept."""
        if self.ended:
            raise Cut("the other side has left")
        self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the other side keeps up."""
        while self._full and not self.ended:
            self._writer = self._loop.create_future()
            await self._bounded(self._writer)

    def close(self) -> None:
        """Send what is kept, and close."""
        self.lost = None
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close so that the other side can tell that something is missing."""
        self.lost = None
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._transport.abort()

    async def _needed(self) -> None:
        if self.ended:
            raise Cut("the other side left in the middle of a message")
        await self._more()

    async def _more(self) -> None:
        self._reader = self._loop.create_future()
        await self._bounded(self._reader)

    async def _bounded(self, waiter: asyncio.Future[None]) -> None:
        timer = self._loop.call_later(self.patience, _give_up, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        _wake(self._reader)
        _wake(self._writer)
        if self.lost is not None:
            self.left = True
            self.lost()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _give_up(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError("the other side said nothing for too long"))
