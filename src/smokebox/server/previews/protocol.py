"""The protocol of the server's listeners: previews go to their proxy, the rest to uvicorn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smokebox.server.previews.proxy import PreviewProxy
from smokebox.tenancy.connections import CountedConnection
from smokebox.tenancy.http_protocol import LimitedHttpProtocol

if TYPE_CHECKING:
    import asyncio

    from smokebox.server.previews.previews import Previews


class ApiOrPreviewProtocol(LimitedHttpProtocol):
    """uvicorn's protocol until a request for a preview comes, and again after it.

    A reverse proxy sends requests for different hosts over one connection, so the start of each
    is looked at.
    """

    def __init__(self, previews: Previews, **options: Any) -> None:
        super().__init__(previews.connections, previews.head_seconds, **options)
        self._previews = previews
        self._options = options
        self._partial = bytearray()

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request (called by asyncio)."""
        if self.is_between_requests:
            scanned = len(self._partial)
            self._partial += data
            kind = self._previews.names.request_kind(self._partial, scanned)
            if kind == "partial":
                self._unset_keepalive_if_required()
                self.start_deadline()
                return
            data = bytes(self._partial)
            self._partial.clear()
            if kind == "preview":
                self._start_proxy(data)
                return
        super().data_received(data)

    def has_partial_head(self) -> bool:
        """Tell whether a part of a head has arrived."""
        return bool(self._partial) or super().has_partial_head()

    def _start_proxy(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.stop_deadline()
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
