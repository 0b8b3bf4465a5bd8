"""Client side of the handler channel: runs handlers of this process for a server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from smokebox.egress.channel_streams import ChannelStreams
from smokebox.egress.handler import Refused, handler_name, run_handler
from smokebox.egress.message import MessageBody, Request, Response
from smokebox.egress.remote_handlers import fields_of
from smokebox.wire.handlers import (
    BrokenFrame,
    Content,
    FailFrame,
    ForwardedFrame,
    ForwardFrame,
    FromServer,
    HandleFrame,
    Piece,
    PullFrame,
    RefuseFrame,
    RequestEndFrame,
    RespondFrame,
    SendFrame,
    StopFrame,
    UnforwardedFrame,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.egress.channel_streams import Send
    from smokebox.egress.handler import Handler
    from smokebox.wire.frames import Frame

# Largest body in memory that is sent within the frame of its message.
_MAX_INLINE = 64 * 1024

_log = logging.getLogger("smokebox.egress")


class HandlerServer:
    """Runs handlers, by slot, for requests that arrive over a channel."""

    def __init__(
        self, sandbox_id: str, handlers: Mapping[str, Handler], env: Any, send: Send
    ) -> None:
        self._sandbox_id = sandbox_id
        self._handlers = handlers
        self._env = env
        self._send = send
        self._streams = ChannelStreams(send)
        self._running: dict[int, tuple[asyncio.Task[None], _ChannelContext]] = {}

    def receive(self, frame: FromServer | Piece) -> None:
        """Handle a frame of the server."""
        if isinstance(frame, HandleFrame):
            context = _ChannelContext(self._sandbox_id, frame, self._streams, self._send)
            task = self._streams.spawn(self._handle(frame, context))
            self._running[frame.id] = (task, context)
        elif isinstance(frame, RequestEndFrame):
            if (running := self._running.pop(frame.id, None)) is not None:
                running[0].cancel()
            self._streams.drop(frame.id)
        elif isinstance(frame, (ForwardedFrame, UnforwardedFrame)):
            if frame.id in self._running:
                self._running[frame.id][1].receive(frame)
        elif isinstance(frame, (PullFrame, StopFrame, BrokenFrame, Piece)):
            self._streams.receive(frame)

    async def aclose(self) -> None:
        """Cancel all handlers, because the channel is closed."""
        self._running.clear()
        await self._streams.aclose("the server disconnected")

    async def _handle(self, frame: HandleFrame, context: _ChannelContext) -> None:
        offers = False
        try:
            result = await self._run(frame, context)
            offers = (
                isinstance(result, (SendFrame, RespondFrame)) and result.content.stream is not None
            )
            with contextlib.suppress(ConnectionError):
                await self._send(result)
        finally:
            self._running.pop(frame.id, None)
            if not offers:
                self._streams.drop(frame.id)

    async def _run(self, frame: HandleFrame, context: _ChannelContext) -> Frame:
        handler = self._handlers.get(frame.slot)
        if handler is None:
            return RefuseFrame(id=frame.id, reason="the client has removed the handler")
        try:
            result = await run_handler(handler, context.request, self._env, context)
            content = context.encode_body(result.body)
        except Refused as error:
            return RefuseFrame(id=frame.id, reason=str(error) or "the handler refused")
        except Exception as error:
            # Its message may contain a secret: the server gets the class only.
            _log.warning("the handler %s failed", handler_name(handler), exc_info=error)
            return FailFrame(id=frame.id, kind=type(error).__name__)
        headers = fields_of(result.headers)
        if isinstance(result, Response):
            return RespondFrame(id=frame.id, status=result.status, headers=headers, content=content)
        return SendFrame(
            id=frame.id, method=result.method, url=result.url, headers=headers, content=content
        )


class _ChannelContext:
    """`HandlerContext` of one request, which forwards through the server."""

    def __init__(
        self, sandbox_id: str, frame: HandleFrame, streams: ChannelStreams, send: Send
    ) -> None:
        self.sandbox_id = sandbox_id
        self.rule = frame.rule
        body = streams.open(frame.id, 0) if frame.body else None
        self.request = Request(frame.method, frame.url, CIMultiDict(frame.headers), body)
        self._id = frame.id
        self._streams = streams
        self._send = send
        self._numbers = itertools.count(1)
        self._body = self.request.body
        self._forwarded: dict[int, MessageBody] = {}
        self._waiting: dict[int, asyncio.Future[ForwardedFrame]] = {}

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        """Send a request through the server, and return the response as it arrives."""
        number = next(self._numbers)
        frame = ForwardFrame(
            id=self._id,
            number=number,
            method=request.method,
            url=request.url,
            headers=fields_of(request.headers),
            content=self.encode_body(request.body),
            to=to,
        )
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(frame)
            head = await waiter
        finally:
            del self._waiting[number]
        body = MessageBody(self._streams.open(self._id, number))
        self._forwarded[number] = body
        return Response(body, head.status, CIMultiDict(head.headers))

    def receive(self, frame: ForwardedFrame | UnforwardedFrame) -> None:
        """Handle the response to a `forward`."""
        waiter = self._waiting.get(frame.number)
        if waiter is None or waiter.done():
            return
        if isinstance(frame, ForwardedFrame):
            waiter.set_result(frame)
        else:
            waiter.set_exception(ConnectionError(frame.reason))

    def encode_body(self, body: MessageBody) -> Content:
        """Encode a body for a frame. An unread body of the server is only referred to."""
        if (data := body.data) is not None and len(data) <= _MAX_INLINE:
            return Content(data=data)
        if data is None and not body.unread:
            raise ValueError("the body was read, and not kept")
        if body is self._body and data is None:
            return Content(keep=True)
        for number, one in self._forwarded.items():
            if one is body and data is None:
                return Content(of=number)
        stream = next(self._numbers)
        self._streams.offer(self._id, stream, body)
        return Content(stream=stream)
