"""What a connection to the server meets first: requests for previews go another way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from smokebox.server.previews.visitor import Visitor

if TYPE_CHECKING:
    import asyncio

    from smokebox.server.previews.previews import Previews


class Front(HttpToolsProtocol):
    """uvicorn's, until a request for a preview comes, and again after it.

    Proxies send requests for all kinds of names over one connection: each that begins with
    its own bytes is looked at.
    """

    def __init__(self, previews: Previews, **options: Any) -> None:
        super().__init__(**options)
        self._previews = previews
        self._options = options
        self._partial = b""

    def data_received(self, data: bytes) -> None:
        """Of asyncio: a piece of a request."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            if self._partial:
                data, self._partial = self._partial + data, b""
            kind = self._previews.sites.kind_of(data)
            if kind == "partial":
                self._unset_keepalive_if_required()
                self._partial = data
                return
            if kind == "preview":
                self._give_away(data)
                return
        super().data_received(data)

    def _give_away(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        visitor = Visitor(self._previews, self._take_back)
        visitor.connection_made(self.transport)
        self.transport.set_protocol(visitor)
        visitor.data_received(data)

    def _take_back(self, transport: asyncio.Transport, data: bytes) -> None:
        front = Front(self._previews, **self._options)
        front.connection_made(transport)
        transport.set_protocol(front)
        front.data_received(data)
