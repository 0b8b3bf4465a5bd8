"""WebSocket connections that notice when nobody is at the other end any more."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent
    from websockets.http11 import Request

PING_SECONDS = 20.0
PONG_SECONDS = 20.0
# Where the scope has the event of a connection's end.
LOST = "smokebox.lost"

_NOT_TEXT = 1007


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, which asks whether anybody is there, for handlers that may not read on.

    While what came is not taken, nothing is read, neither the answer to a ping nor the end
    of the connection. Then the kernel tells whether the other end takes what we send, and
    the event in the scope that the connection is lost.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            patience = round((PING_SECONDS + PONG_SECONDS) * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            cast("dict[str, Any]", self.scope)[LOST] = self._lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self.close_sent:
            # By the protocol itself, for what came; for uvicorn that is the handler's fault.
            raise ClientDisconnected
        await super().send(message)

    def keepalive_timeout(self) -> None:
        if not self.read_paused:
            super().keepalive_timeout()
            return
        self.pong_timer = None
        self.pending_ping_payload = None
        self.schedule_ping()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not _is_text(self.frames):
            # Without the traceback that uvicorn logs for it.
            self.frames = []
            self.conn.fail(_NOT_TEXT, "text that is not UTF-8")
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()


def _is_text(frames: list[bytes]) -> bool:
    try:
        b"".join(frames).decode()
    except UnicodeDecodeError:
        return False
    return True
