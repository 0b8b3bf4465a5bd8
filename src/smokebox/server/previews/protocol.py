"""The protocol of the server's listeners: previews go to their proxy, the rest to uvicorn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from smokebox.foundation.http1.connection import Connection
from smokebox.server.previews.proxy import PreviewProxy
from smokebox.server.tenancy.peer import PEER, Peer

if TYPE_CHECKING:
    import asyncio

    from smokebox.server.previews.previews import Previews


class ApiOrPreviewProtocol(HttpToolsProtocol):
    """uvicorn's protocol until a request for a preview comes, and again after it.

    A reverse proxy sends requests for different hosts over one connection, so the start of each
    is looked at.
    """

    def __init__(self, previews: Previews, **options: Any) -> None:
        super().__init__(**options)
        self._previews = previews
        self._options = options
        self._partial = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio with a new connection."""
        super().connection_made(transport)
        self._peer = Peer(transport)

    def on_message_begin(self) -> None:
        """Called by the parser at the start of a request."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[PEER] = self._peer

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with bytes of a request."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            if self._partial:
                data, self._partial = self._partial + data, b""
            kind = self._previews.names.request_kind(data)
            if kind == "partial":
                self._unset_keepalive_if_required()
                self._partial = data
                return
            if kind == "preview":
                self._start_proxy(data)
                return
        super().data_received(data)

    def _start_proxy(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        connection = Connection(timeout=None)
        connection.connection_made(self.transport)
        self.transport.set_protocol(connection)
        connection.data_received(data)
        PreviewProxy(self._previews, connection, self._resume)

    def _resume(self, transport: asyncio.Transport, data: bytes) -> None:
        protocol = ApiOrPreviewProtocol(self._previews, **self._options)
        protocol.connection_made(transport)
        transport.set_protocol(protocol)
        protocol.data_received(data)
