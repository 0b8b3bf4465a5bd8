"""uvicorn's HTTP protocol with limits of connections, and a deadline and a length of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from smokebox.foundation.http1.head import MAX_HEAD, write_response
from smokebox.tenancy.connections import refusal
from smokebox.tenancy.peer import PEER, Peer

if TYPE_CHECKING:
    import asyncio

    from smokebox.tenancy.connections import ConnectionLimits


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection that counts towards the limits, and whose requests have their peer in the scope.

    The head of a request has a deadline and a greatest length, and so has whatever else is neither
    a head nor a body, such as trailers.

    Args:
        limits: Where the connection is counted until it is closed.
        head_seconds: The deadline of heads.
    """

    def __init__(self, limits: ConnectionLimits, head_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._head_seconds = head_seconds
        # Bytes since the last whole head, piece of a body, or end of one.
        self._unframed = 0
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_between_requests(self) -> bool:
        """True if the next bytes belong to the next request."""
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it (called by asyncio)."""
        super().connection_made(transport)
        self._peer = Peer(transport)
        error = self._limits.add(transport)
        if error is None:
            self.start_deadline()
        else:
            self._close_with(refusal(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end (called by asyncio)."""
        super().connection_lost(exc)
        self.stop_deadline()
        self._limits.remove(self.transport)

    def on_message_begin(self) -> None:
        """Note the peer in the scope of a request (called by httptools)."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[PEER] = self._peer

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request (called by asyncio)."""
        self._unframed += len(data)
        super().data_received(data)
        if self._unframed:
            self._check_unframed()

    def on_headers_complete(self) -> None:
        """Start a request (called by httptools)."""
        self._unframed = 0
        self.stop_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Buffer a piece of a body (called by httptools)."""
        self._unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request (called by httptools)."""
        self._unframed = 0
        self.stop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or a short time for the rest of this one."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self.start_deadline()

    def has_partial_head(self) -> bool:
        """Tell whether a part of a head has arrived."""
        return self._unframed > 0

    def start_deadline(self) -> None:
        """Close the connection unless a head arrives in time."""
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._head_seconds, self._close_late)

    def stop_deadline(self) -> None:
        """Wait for any time."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_unframed(self) -> None:
        """Close the connection if a head is too long; else the rest must come in time."""
        waiting = self.cycle is None or self.cycle.response_complete
        if self._unframed > MAX_HEAD:
            unstarted = waiting or not self.cycle.response_started
            self._close_with(_empty_response(431, "Headers Too Large") if unstarted else b"")
        elif waiting:
            self.start_deadline()

    def _close_late(self) -> None:
        self._deadline = None
        late = self.has_partial_head()
        self._close_with(_empty_response(408, "Request Timeout") if late else b"")

    def _close_with(self, response: bytes) -> None:
        self.stop_deadline()
        if not self.transport.is_closing():
            self.transport.write(response)
            self.transport.close()


class CountedWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol on a connection that counts until it is closed."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end (called by asyncio)."""
        super().connection_lost(exc)
        self._limits.remove(self.transport)


def _empty_response(status: int, reason: str) -> bytes:
    return write_response(status, reason, [("content-length", "0"), ("connection", "close")])
