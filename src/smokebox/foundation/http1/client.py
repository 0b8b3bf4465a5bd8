"""Requests over pooled connections, and their responses as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from smokebox.foundation.http1.body import BodyReader, BodyWriter
from smokebox.foundation.http1.connection import Connection, ConnectionLost
from smokebox.foundation.http1.head import (
    MAX_HEAD,
    Fields,
    Framing,
    MalformedMessage,
    parse_response,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from smokebox.foundation.http1.pool import ConnectionPool

# As curl does: a server that ignores Expect waits for the body while we wait for it.
_CONTINUE_SECONDS = 1.0
# Interim responses to one request. Their heads and the final one together have MAX_HEAD bytes.
_MAX_INTERIM = 32
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

RequestBody: TypeAlias = bytes | BodyReader | AsyncIterable[bytes]


@dataclass(slots=True, kw_only=True)
class ClientRequest:
    """A request to send. `head` includes the framing and the empty line.

    `expects_continue` says that the head has `Expect: 100-continue`, and `upgrade` that a
    response of 101 is welcome. `head_seconds` is how long the server may take from the first
    byte of a response's head to its last.
    """

    method: str
    head: bytes
    body: RequestBody = b""
    framing: Framing = 0
    upgrade: bool = False
    expects_continue: bool = False
    head_seconds: float | None = None


class StaleConnection(ConnectionLost):
    """The server closed the connection before it sent any byte of a response."""


class RequestBodyFailed(Exception):
    """The source of a request's body raised `error`, so the request could not be sent."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ClientResponse:
    """A response whose head has arrived. Call `release`, whatever happens.

    `length` is the size of the body, or None if it is not known in advance. `ambiguous` and
    `raw_head` are those of `ResponseHead`.
    """

    status: int
    reason: str
    fields: Fields
    length: int | None
    ambiguous: bool
    raw_head: bytes

    def __init__(
        self, pool: ConnectionPool, key: Hashable, connection: Connection, request: ClientRequest
    ) -> None:
        self.connection = connection
        self._pool = pool
        self._key = key
        self._request = request
        self._body: BodyReader | None = None
        self._keep_alive = False
        self._interim = 0
        self._head_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self._sender_error: Exception | None = None

    @property
    def done(self) -> bool:
        """True once the whole body was read."""
        return self._body is not None and self._body.done

    @property
    def ready(self) -> bool:
        """True if reading the next piece does not wait."""
        return self._body is not None and self._body.ready

    async def read(self) -> bytes:
        """Read the next piece of the body, which may be empty; `done` is True after the last.

        Raises:
            ConnectionLost: The server closed the connection before the end.
            MalformedMessage: The body is not valid.
            RequestBodyFailed: The rest of the request could not be sent.
            TimeoutError: The server stayed silent.
        """
        assert self._body is not None
        try:
            return await self._body.read()
        except (ConnectionLost, MalformedMessage):
            self._raise_sender_error()
            raise

    def release(self) -> None:
        """Return the connection to its pool, or close it if it cannot be used again."""
        keep = self._keep_alive and self.done and self._sender_error is None
        if self._sender is not None and not self._sender.done():
            self._sender.cancel()
            keep = False
        if keep:
            self._pool.put(self._key, self.connection)
        else:
            self.connection.abort()

    async def aclose(self) -> None:
        """Release the connection, and wait until the source of the request's body has stopped."""
        self.release()
        if self._sender is not None:
            await asyncio.wait((self._sender,))
            # Its error refers to the frame that has the last piece, and that to this object.
            self._sender = None

    async def _exchange(self) -> ClientResponse:
        """Send the request, and read the head of the response."""
        request, body = self._request, self._request.body
        try:
            if isinstance(body, bytes):
                with contextlib.suppress(ConnectionLost):
                    self.connection.write(request.head + body if body else request.head)
                await self._read_head(None)
            else:
                await self._send_with_body(body)
        except BaseException:
            self.release()
            raise
        return self

    async def _send_with_body(self, body: BodyReader | AsyncIterable[bytes]) -> None:
        request = self._request
        writer = BodyWriter(self.connection, request.head, chunked=request.framing == "chunked")
        if request.expects_continue:
            writer.flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CONTINUE_SECONDS):
                    await self._read_head(lambda: self._start_sender(body, writer))
                    return
        self._start_sender(body, writer)
        await self._read_head(None)

    def _start_sender(self, body: BodyReader | AsyncIterable[bytes], writer: BodyWriter) -> None:
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_body(body, writer))

    async def _send_body(self, body: BodyReader | AsyncIterable[bytes], writer: BodyWriter) -> None:
        connection, framing = self.connection, self._request.framing
        remaining = framing if isinstance(framing, int) else None
        try:
            connection.peer_waits = True
            async for piece in body:
                connection.peer_waits = False
                if remaining is not None and (remaining := remaining - len(piece)) < 0:
                    raise MalformedMessage("the body of the request is longer than it said", 502)
                await writer.write(piece)
                connection.peer_waits = True
            connection.peer_waits = False
            if remaining:
                raise MalformedMessage("the body of the request is shorter than it said", 502)
            await writer.finish()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # A server that stopped reading may have responded before: read that first.
            if not isinstance(error, ConnectionLost) or not connection.broken:
                self._sender_error = error
                connection.abort()
        finally:
            connection.peer_waits = False

    async def _read_head(self, on_continue: Callable[[], None] | None) -> None:
        connection, request = self.connection, self._request
        while True:
            try:
                raw = await connection.read_head(seconds=request.head_seconds)
                if raw is None:
                    raise _lost(connection)
                head = parse_response(raw, request.method)
                self._count_head(len(raw), interim=head.status < 200)
            except (ConnectionLost, MalformedMessage):
                self._raise_sender_error()
                raise
            if head.status >= 200 or (head.status == 101 and request.upgrade):
                break
            if head.status == 101:
                raise MalformedMessage("the server changed the protocol without being asked", 502)
            if head.status == 100 and on_continue is not None:
                on_continue()
                on_continue = None
        self.status, self.reason, self.fields = head.status, head.reason, head.fields
        self.length = head.framing if isinstance(head.framing, int) else None
        self.ambiguous, self.raw_head = head.ambiguous, raw
        self._body = BodyReader(connection, head.framing)
        self._keep_alive = head.keep_alive and head.status != 101

    def _count_head(self, size: int, *, interim: bool) -> None:
        """Raise `MalformedMessage` above the limits for all heads of one response."""
        self._head_bytes += size
        self._interim += interim
        too_long = self._interim and self._head_bytes > MAX_HEAD
        if self._interim > _MAX_INTERIM or too_long:
            raise MalformedMessage("the server sent too many interim responses", 502)

    def _raise_sender_error(self) -> None:
        """Raise what the source of the body raised: it explains why the connection was lost."""
        if self._sender_error is not None:
            raise RequestBodyFailed(self._sender_error) from self._sender_error


async def send(
    pool: ConnectionPool,
    key: Hashable,
    connect: Callable[[], Awaitable[Connection]],
    request: ClientRequest,
    *,
    reuse: bool = True,
) -> ClientResponse:
    """Send a request over an idle connection of `key`, or else over a new one.

    A request that is safe to repeat is sent again if an idle connection turns out to be closed.

    Args:
        connect: Opens a connection; what it raises is raised.
        reuse: False for a new connection in any case.

    Raises:
        StaleConnection: The server closed the connection without a response.
        ConnectionLost: The server closed it in the middle of the response's head.
        MalformedMessage: The response is not valid.
        RequestBodyFailed: The source of the request's body raised an error.
        TimeoutError: The server stayed silent, or took too long to send the head.
    """
    if isinstance(request.body, BodyReader) and request.body.whole:
        request.body = await request.body.read()
    while reuse and (connection := pool.take(key)) is not None:
        try:
            return await ClientResponse(pool, key, connection, request)._exchange()
        except StaleConnection:
            if request.method not in _REPEATABLE or not isinstance(request.body, bytes):
                raise
    return await ClientResponse(pool, key, await connect(), request)._exchange()


def _lost(connection: Connection) -> ConnectionLost:
    if connection.buffered:
        return ConnectionLost("the server closed the connection within the response's head")
    return StaleConnection("the server closed the connection without a response")
