"""Requests and their answers over HTTP/1.1, by a unix socket, TCP or TLS.

By itself: a library for all of HTTP takes longer for a small request than the server does,
and longer to import than most commands of a command line take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from smokebox import wire
from smokebox.client.answering import Answer, Broken
from smokebox.client.body import pieces_of
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping

# Less than what the server keeps an idle connection for: it must not end under a request.
_KEEP_ALIVE = 30.0
# So much of an answer waits for one who reads it late; the rest waits at the server.
_MOST_HELD = 1 << 19


class Exchanges:
    """Connections to one server on one event loop; those that are idle wait for the next.

    `base` is what comes before every target, `connect` makes a connection.
    """

    def __init__(
        self, base: str, headers: Mapping[str, str], connect: Callable[[], Awaitable[Exchange]]
    ) -> None:
        self._base = base
        self._head = _lines(headers)
        self._connect = connect
        self._idle: deque[Exchange] = deque()

    async def ask(
        self,
        method: str,
        target: str,
        data: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> Answer:
        """Send a request and give its answer. Raises `Broken` where none comes."""
        async with self.open(method, target, data, headers) as exchange:
            return await exchange.answer()

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        target: str,
        data: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> AsyncIterator[Exchange]:
        """Send a request, and give the exchange whose answer has begun.

        Whoever leaves before its end ends the connection, and so what the server does.
        """
        head = f"{method} {self._base}{target} HTTP/1.1\r\n{self._head}{_lines(headers)}"
        exchange = self._free() or await self._connect()
        try:
            exchange.begin(head, data)
            await exchange.begun()
            yield exchange
        finally:
            await exchange.end()
            if not exchange.parted:
                self._idle.append(exchange)

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()

    def _free(self) -> Exchange | None:
        """The connection that was used last, and close those that have waited for too long."""
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].used_at > _KEEP_ALIVE:
            self._idle.popleft().close()
        while self._idle:
            exchange = self._idle.pop()
            if not exchange.parted:
                return exchange
        return None


class Exchange(asyncio.Protocol):
    """One connection, with one request at a time; `parted` once it is good for no other.

    `status` is that of the answer, 0 before there is one.
    """

    def __init__(self) -> None:
        self.parted = False
        self.used_at = 0.0
        self.status = 0
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._whole, self._bounded = True, False
        # Whom the other side waits for: a reader of ours, a writer of ours.
        self._reader_late = self._writer_late = self._full = False

    def begin(self, head: str, data: bytes | AsyncIterable[bytes] | None) -> None:
        """Send a request; of a body that is not sent at once, the rest is sent meanwhile."""
        self.status, self._whole, self._bounded = 0, False, False
        self._retry_after: float | None = None
        self._pieces: list[bytes] = []
        self._held = 0
        self._fault: Exception | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.used_at = self._loop.time()
        self._watching = self._loop.call_later(wire.SILENCE, self._watch)
        if data is None or isinstance(data, bytes):
            head += f"content-length: {len(data or b'')}\r\n\r\n"
        else:
            head += "transfer-encoding: chunked\r\n\r\n"
        pieces = pieces_of(data)
        if isinstance(pieces, bytes):
            self._transport.write(head.encode() + pieces)
        else:
            self._transport.write(head.encode())
            framed = not isinstance(data, bytes)
            self._feeding = self._loop.create_task(self._feed(pieces, framed=framed))

    async def begun(self) -> None:
        """Return once the answer has begun. Raises what the source of the body raised."""
        while not self.status:
            await self._hear()

    async def piece(self) -> bytes:
        """The next bytes of the answer, nothing after the last."""
        while not self._pieces:
            if self._whole:
                return b""
            await self._hear()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._held = [], 0
        if self._reader_late:
            self._reader_late, self.used_at = False, self._loop.time()
            if not self.parted:
                self._transport.resume_reading()
        return data

    async def answer(self) -> Answer:
        """The whole of the answer."""
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return Answer(self.status, b"".join(pieces), self._retry_after)

    async def end(self) -> None:
        """Be done with a request. One that is not at its end takes the connection with it."""
        self._watching.cancel()
        feeding, self._feeding = self._feeding, None
        if not self._whole or (feeding is not None and not feeding.done()):
            # What is still to come would be taken for the next answer; and the end of the
            # connection ends what the server does.
            self.close()
        if feeding is not None:
            feeding.cancel()
            await asyncio.wait((feeding,))

    def close(self) -> None:
        """End the connection."""
        self.parted = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio: it begins."""
        # Those of uvloop do not say that they are transports.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Of asyncio: a piece of an answer."""
        self.used_at = self._loop.time()
        if self._whole:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Broken(f"what answers does not speak HTTP: {error}"))
        if self._held > _MOST_HELD and not self._whole and not self.parted:
            self._reader_late = True
            self._transport.pause_reading()
        _wake(self._news)

    def connection_lost(self, error: Exception | None) -> None:
        """Of asyncio: it has ended."""
        self.parted = True
        if self.status and not self._bounded and error is None:
            self._whole = True
        self._fail(Broken(str(error or "the server closed the connection")))
        self.resume_writing()

    def pause_writing(self) -> None:
        """Of asyncio: enough waits to be sent."""
        self._full = True

    def resume_writing(self) -> None:
        """Of asyncio: there is room again."""
        self._full = False
        _wake(self._room)

    def on_message_begin(self) -> None:
        """Of httptools: another answer."""
        if self._whole:
            raise Broken("there are two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of httptools: a header."""
        name = name.lower()
        if name == b"retry-after":
            with contextlib.suppress(ValueError):
                self._retry_after = max(0.0, float(value))
        elif name in (b"content-length", b"transfer-encoding"):
            self._bounded = True

    def on_headers_complete(self) -> None:
        """Of httptools: the answer begins, unless it is a word that goes before one."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, data: bytes) -> None:
        """Of httptools: a piece of the body."""
        self._pieces.append(data)
        self._held += len(data)

    def on_message_complete(self) -> None:
        """Of httptools: that was all."""
        if not self.status:
            return
        self._whole = True
        if not self._parser.should_keep_alive():
            self.close()

    async def _hear(self) -> None:
        """Wait for something to happen. Raises for what has gone wrong."""
        if self._fault is not None:
            raise self._fault
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None

    async def _feed(self, pieces: AsyncIterable[bytes], *, framed: bool) -> None:
        """Send the body, as fast as the server takes it."""
        try:
            self._writer_late = True
            async for piece in pieces:
                self._writer_late, self.used_at = False, self._loop.time()
                if self._transport.is_closing():
                    # A source that never waits would keep us from hearing of it.
                    return
                if piece:
                    self._transport.write(
                        b"%x\r\n%b\r\n" % (len(piece), piece) if framed else piece
                    )
                await self._flushed()
                self._writer_late = True
            if framed and not self._transport.is_closing():
                self._transport.write(b"0\r\n\r\n")
        except Exception as error:
            self._fail(error)
        finally:
            self._writer_late, self.used_at = False, self._loop.time()

    async def _flushed(self) -> None:
        while self._full and not self._transport.is_closing():
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None
            self.used_at = self._loop.time()

    def _watch(self) -> None:
        if self._reader_late or self._writer_late:
            self.used_at = self._loop.time()
        left = self.used_at + wire.SILENCE - self._loop.time()
        if left > 0:
            self._watching = self._loop.call_later(left, self._watch)
        else:
            self._fail(Broken("the server says nothing any more"))

    def _fail(self, error: Exception) -> None:
        """Have whoever waits raise this, unless the answer is whole."""
        if not self._whole:
            self._fault = self._fault or error
        self.close()
        _wake(self._news)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _lines(headers: Mapping[str, str]) -> str:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        # It would be another header, or another request.
        raise InvalidOption(
            "a key that is sent with a request has no line breaks.",
            hint="Leave them out; is there one at the end of SMOKEBOX_API_KEY?",
            option="key",
        )
    return lines
