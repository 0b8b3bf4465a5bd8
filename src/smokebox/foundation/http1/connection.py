"""One end of a connection: bytes that arrived and were not read, and bytes to send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING

from smokebox.foundation.http1.head import MalformedMessage, find_head_end
from smokebox.foundation.loop_shares import pause

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

# Above this, reading pauses until some was taken: the peer's own buffers fill, and it waits.
HIGH_WATER = 256 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class ConnectionLost(ConnectionError):
    """The peer closed the connection in the middle of a message."""


class Connection(asyncio.Protocol):
    """A buffered connection that is read by pulling, and so slows down a fast peer.

    Args:
        timeout: Seconds that the peer may stay silent while it is waited for, either way;
            None for ever. Bytes in either direction start it again.
        on_lost: Called when the peer closes the connection; `lost` is True then. Not called
            after `close` or `abort`.
    """

    def __init__(
        self, *, timeout: float | None, on_lost: Callable[[], object] | None = None
    ) -> None:
        self.on_lost = on_lost
        self.ended = False
        self.lost = False
        self.error: Exception | None = None
        # Set while the peer waits for us, for example for the next piece of a request's body.
        self.peer_waits = False
        # Set between two requests: whatever the peer sends then belongs to no response.
        self.idle = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        # `_start` is how much of the buffer was read: cutting it off each time would cost more.
        self._buffer = b""
        self._start = 0
        self._reading_paused = False
        self._writing_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._active_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start (called by asyncio)."""
        # Those of uvloop are no subclass of asyncio.Transport.
        self._transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        """Buffer received bytes (called by asyncio)."""
        if self.idle:
            self.abort()
            self._end()
            return
        if self._timer is not None:
            self._active_at = self._loop.time()
        if len(self._buffer) > self._start:
            data = self._buffer[self._start :] + data
        self._buffer, self._start = data, 0
        if len(data) > HIGH_WATER and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def eof_received(self) -> bool:
        """Treat a half-closed connection as closed, as other proxies do (called by asyncio)."""
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end (called by asyncio)."""
        self.error = exc
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end()

    def pause_writing(self) -> None:
        """Note that the peer does not keep up (called by asyncio)."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Note that the peer has caught up (called by asyncio)."""
        self._writing_paused = False
        self._active_at = self._loop.time()
        _wake(self._writer)

    @property
    def transport(self) -> asyncio.Transport:
        """The transport of asyncio."""
        assert self._transport is not None
        return self._transport

    @property
    def buffered(self) -> int:
        """The number of bytes that arrived and were not read."""
        return len(self._buffer) - self._start

    @property
    def has_line(self) -> bool:
        """True if a whole line is in the buffer."""
        return self._buffer.find(b"\n", self._start) >= 0

    @property
    def timeout(self) -> float | None:
        """Seconds that the peer may stay silent while it is waited for."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        if seconds != self._timeout:
            self._timeout = seconds
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def read_head(self, *, seconds: float | None = None) -> bytes | None:
        """Read up to an empty line, and include it; None if the peer closes before.

        Args:
            seconds: Longest time from the first byte to the last; None for any.

        Raises:
            MalformedMessage: The head is too long, or a line ends without a carriage return.
            TimeoutError: The peer stayed silent, or took too long.
        """
        while not self.buffered:
            if self.ended:
                return None
            await self._receive()
        end = find_head_end(self._buffer, self._start)
        if not end:
            async with asyncio.timeout(seconds):
                end = await self._wait_for_head_end()
            if not end:
                return None
        if end == len(self._buffer) and not (self._start or self._reading_paused):
            head, self._buffer = self._buffer, b""
            return head
        return self.take(end - self._start)

    async def _wait_for_head_end(self) -> int:
        """Return the index after the head; 0 if the peer closes before."""
        end = 0
        while not end and not self.ended:
            scanned = self.buffered
            await self._receive()
            end = find_head_end(self._buffer, self._start, scanned)
        return end

    async def read_line(self, limit: int) -> bytes:
        """Read up to the next CRLF, and leave it out. Raises `MalformedMessage`."""
        while (end := self._buffer.find(b"\n", self._start)) < 0:
            if self.buffered > limit:
                raise MalformedMessage(f"a line is longer than {limit} bytes")
            await self._require()
        line = self.take(end + 1 - self._start)
        if len(line) > limit or not line.endswith(b"\r\n"):
            raise MalformedMessage("a line does not end as it should")
        return line[:-2]

    async def read(self, limit: int = HIGH_WATER) -> bytes:
        """Read at least one byte and at most `limit`; nothing once the peer has closed."""
        while not self.buffered:
            if self.ended:
                return b""
            await self._receive()
        return self.take(limit)

    async def read_exactly(self, size: int) -> bytes:
        """Read that many bytes. Raises `ConnectionLost` if the peer closes before."""
        while self.buffered < size:
            await self._require()
        return self.take(size)

    def take(self, limit: int = 1 << 62) -> bytes:
        """Remove and return at most `limit` bytes of the buffer."""
        if limit >= self.buffered:
            data = self._buffer[self._start :]
            self._buffer, self._start = b"", 0
        else:
            data = self._buffer[self._start : self._start + limit]
            self._start += limit
        if self._reading_paused and self.buffered <= HIGH_WATER:
            self._reading_paused = False
            if not self.ended:
                self.transport.resume_reading()
        return data

    def put_back(self, data: bytes) -> None:
        """Return bytes to the front of the buffer."""
        self._buffer, self._start = data + self._buffer[self._start :], 0

    @property
    def broken(self) -> bool:
        """True if nothing can be sent, also before `ended` says so.

        A broken transport drops what is written, and reports it in a later iteration of the event
        loop, which a body that never waits would not let happen.
        """
        return self.ended or self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send or buffer bytes; `drain` waits while too many are buffered."""
        if self.broken:
            raise ConnectionLost("the peer has closed the connection")
        if self._timer is not None:
            self._active_at = self._loop.time()
        self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the peer keeps up."""
        while self._writing_paused and not self.ended:
            self._writer = self._loop.create_future()
            self._start_timer()
            await self._writer

    def enable_keepalive(self) -> None:
        """Have the kernel probe a silent peer, so that a dead one is noticed."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def close(self) -> None:
        """Send what is buffered, and close."""
        self.on_lost = None
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Reset the connection, so that the peer can tell that something is missing."""
        self.on_lost = None
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()

    async def _require(self) -> None:
        if self.ended:
            raise ConnectionLost("the peer closed the connection in the middle of a message")
        await self._receive()

    def _receive(self) -> asyncio.Future[None]:
        """Return a future for the next bytes, or the end."""
        self._reader = self._loop.create_future()
        self._start_timer()
        return self._reader

    def _start_timer(self) -> None:
        # One timer for many waits: it looks at the last activity when it fires.
        if self._timeout is not None:
            self._active_at = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout, self._check_timeout)

    def _check_timeout(self) -> None:
        self._timer = None
        waiters = [one for one in (self._reader, self._writer) if one is not None]
        waiters = [one for one in waiters if not one.done()]
        if not waiters or self._timeout is None:
            return
        now = self._loop.time()
        if self.peer_waits:
            self._active_at = now
        remaining = self._active_at + self._timeout - now
        if remaining > 0:
            self._timer = self._loop.call_later(remaining, self._check_timeout)
            return
        for waiter in waiters:
            waiter.set_exception(TimeoutError("the peer stayed silent for too long"))

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        _wake(self._reader)
        _wake(self._writer)
        if self.on_lost is not None:
            self.lost = True
            self.on_lost()


async def relay_both(*ways: Coroutine[None, None, None]) -> None:
    """Run one coroutine for each direction until either ends, and raise what it raised."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def relay_bytes(
    source: Connection, sink: Connection, count: Callable[[int], None] | None = None
) -> None:
    """Pass bytes on, unread, until either side closes or stays silent."""
    with contextlib.suppress(ConnectionLost, TimeoutError):
        while data := await source.read():
            if count is not None:
                count(len(data))
            sink.write(data)
            await sink.drain()
            await pause()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
