"""Small requests over a unix socket: for speed, without what aiohttp does for each.

For a request of a few bytes that takes longer than the server does. All that is large,
streamed or remote goes by aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from smokebox import wire
from smokebox.client.answering import Answer, Unconnected

if TYPE_CHECKING:
    from collections.abc import Mapping

# Less than what the server keeps an idle connection for: it must not end under a request.
_KEEP_ALIVE = 30.0
_CONNECT_SECONDS = 10.0


class Exchanges:
    """Connections to one socket on one event loop; those that are idle wait for the next."""

    def __init__(self, path: str, headers: Mapping[str, str]) -> None:
        self._path = path
        self._head = _lines({"host": "localhost", **headers})
        self._idle: deque[Exchange] = deque()

    async def ask(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request and give its answer. Raises `ConnectionError` where none comes."""
        exchange = self._free() or await self._connect()
        size = 0 if data is None else len(data)
        head = f"{method} {target} HTTP/1.1\r\n{self._head}{_lines(headers)}"
        head += f"content-length: {size}\r\n\r\n"
        answer = await exchange.ask(head.encode() + (data or b""))
        if not exchange.parted:
            self._idle.append(exchange)
        return answer

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

    async def _connect(self) -> Exchange:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, exchange = await loop.create_unix_connection(Exchange, self._path)
        except OSError as error:
            raise Unconnected(error.strerror or str(error)) from error
        return exchange


class Exchange(asyncio.Protocol):
    """One connection, with one request at a time; `parted` once it is good for no other."""

    def __init__(self) -> None:
        self.parted = False
        self.used_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[Answer] | None = None

    async def ask(self, request: bytes) -> Answer:
        """Send a request and give its answer."""
        waiter: asyncio.Future[Answer] = self._loop.create_future()
        self._waiter = waiter
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._retry_after: float | None = None
        self.used_at = self._loop.time()
        self._watching = self._loop.call_later(wire.SILENCE, self._watch)
        self._transport.write(request)
        try:
            return await waiter
        except BaseException:
            # What is still to come would be taken for the next answer; and the end of the
            # connection ends what the server does.
            self.close()
            raise
        finally:
            self._watching.cancel()

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
        if self._waiter is None or self._waiter.done():
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"what answers does not speak HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Of asyncio: it has ended."""
        self.parted = True
        self._fail(ConnectionError(str(error or "the server closed the connection")))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of httptools: a header."""
        if name.lower() == b"retry-after":
            with contextlib.suppress(ValueError):
                self._retry_after = max(0.0, float(value))

    def on_body(self, data: bytes) -> None:
        """Of httptools: a piece of the body."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Of httptools: that was all."""
        status, body = self._parser.get_status_code(), b"".join(self._pieces)
        if not self._parser.should_keep_alive():
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(status, body, self._retry_after))

    def _watch(self) -> None:
        left = self.used_at + wire.SILENCE - self._loop.time()
        if left > 0:
            self._watching = self._loop.call_later(left, self._watch)
        else:
            self._fail(ConnectionError("the server says nothing any more"))

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
