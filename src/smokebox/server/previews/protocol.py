"""The protocol of the server's listeners: previews go to their proxy, the rest to uvicorn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from smokebox.foundation.http1.head import MAX_HEAD, write_response
from smokebox.server.connections import CountedConnection, refusal
from smokebox.server.previews.proxy import PreviewProxy
from smokebox.server.tenancy.peer import PEER, Peer

if TYPE_CHECKING:
    import asyncio

    from smokebox.server.previews.previews import Previews


class ApiOrPreviewProtocol(HttpToolsProtocol):
    """uvicorn's protocol until a request for a preview comes, and again after it.

    A reverse proxy sends requests for different hosts over one connection, so the start of each
    is looked at. The head of a request has a deadline and a greatest length, and so has whatever
    else is neither a head nor a body, such as trailers.
    """

    def __init__(self, previews: Previews, **options: Any) -> None:
        super().__init__(**options)
        self._previews = previews
        self._options = options
        self._partial = bytearray()
        # Bytes since the last whole head, piece of a body, or end of one.
        self._unframed = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it (called by asyncio)."""
        super().connection_made(transport)
        self._peer = Peer(transport)
        error = self._previews.connections.add(transport)
        if error is None:
            self._start_deadline()
        else:
            self._close_with(refusal(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end (called by asyncio)."""
        super().connection_lost(exc)
        self._stop_deadline()
        self._previews.connections.remove(self.transport)

    def on_message_begin(self) -> None:
        """Note the peer in the scope of a request (called by httptools)."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[PEER] = self._peer

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request (called by asyncio)."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            scanned = len(self._partial)
            self._partial += data
            kind = self._previews.names.request_kind(self._partial, scanned)
            if kind == "partial":
                self._unset_keepalive_if_required()
                self._start_deadline()
                return
            data = bytes(self._partial)
            self._partial.clear()
            if kind == "preview":
                self._start_proxy(data)
                return
        self._unframed += len(data)
        super().data_received(data)
        if self._unframed:
            self._check_unframed()

    def on_headers_complete(self) -> None:
        """Start a request (called by httptools)."""
        self._unframed = 0
        self._stop_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Buffer a piece of a body (called by httptools)."""
        self._unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request (called by httptools)."""
        self._unframed = 0
        self._stop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or a short time for the rest of this one."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._start_deadline()

    def _check_unframed(self) -> None:
        """Close the connection if a head is too long; else the rest must come in time."""
        waiting = self.cycle is None or self.cycle.response_complete
        if self._unframed > MAX_HEAD:
            unstarted = waiting or not self.cycle.response_started
            self._close_with(_empty_response(431, "Headers Too Large") if unstarted else b"")
        elif waiting:
            self._start_deadline()

    def _start_deadline(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            seconds = self._previews.head_seconds
            self._deadline = self.loop.call_later(seconds, self._close_late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_late(self) -> None:
        self._deadline = None
        in_head = self._partial or self._unframed
        self._close_with(_empty_response(408, "Request Timeout") if in_head else b"")

    def _close_with(self, response: bytes) -> None:
        self._stop_deadline()
        if not self.transport.is_closing():
            self.transport.write(response)
            self.transport.close()

    def _start_proxy(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._stop_deadline()
        self.connections.discard(self)
        connection = CountedConnection(self._previews.connections)
        connection.connection_made(self.transport)
        self.transport.set_protocol(connection)
        connection.data_received(data)
        PreviewProxy(self._previews, connection, self._resume)

    def _resume(self, transport: asyncio.Transport, data: bytes) -> None:
        protocol = ApiOrPreviewProtocol(self._previews, **self._options)
        protocol.connection_made(transport)
        transport.set_protocol(protocol)
        protocol.data_received(data)


def _empty_response(status: int, reason: str) -> bytes:
    return write_response(status, reason, [("content-length", "0"), ("connection", "close")])
