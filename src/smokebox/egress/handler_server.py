"""The side of the client: handlers of this process, run for a server that asks."""

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
    EndFrame,
    FailFrame,
    ForwardedFrame,
    ForwardFrame,
    FromServer,
    HandleFrame,
    Piece,
    PullFrame,
    RefuseFrame,
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

# A body that is all here, and not longer, goes with its head.
_INLINE = 64 * 1024

_log = logging.getLogger("smokebox.egress")


class HandlerServer:
    """Runs handlers, by slot, for requests that come over a channel."""

    def __init__(
        self, sandbox_id: str, handlers: Mapping[str, Handler], env: Any, send: Send
    ) -> None:
        self._sandbox_id = sandbox_id
        self._handlers = handlers
        self._env = env
        self._send = send
        self._streams = ChannelStreams(send)
        self._running: dict[int, tuple[asyncio.Task[None], _Context]] = {}

    def hear(self, frame: FromServer | Piece) -> None:
        """Take what the server says."""
        if isinstance(frame, HandleFrame):
            context = _Context(self._sandbox_id, frame, self._streams, self._send)
            task = self._streams.spawn(self._handle(frame, context))
            self._running[frame.id] = (task, context)
        elif isinstance(frame, EndFrame):
            if (running := self._running.pop(frame.id, None)) is not None:
                running[0].cancel()
            self._streams.drop(frame.id)
        elif isinstance(frame, (ForwardedFrame, UnforwardedFrame)):
            if frame.id in self._running:
                self._running[frame.id][1].hear(frame)
        elif isinstance(frame, (PullFrame, StopFrame, BrokenFrame, Piece)):
            self._streams.hear(frame)

    async def aclose(self) -> None:
        """The channel is gone: end what runs."""
        self._running.clear()
        await self._streams.aclose("the server went away")

    async def _handle(self, frame: HandleFrame, context: _Context) -> None:
        offers = False
        try:
            answer = await self._answer(frame, context)
            offers = (
                isinstance(answer, (SendFrame, RespondFrame)) and answer.content.stream is not None
            )
            with contextlib.suppress(ConnectionError):
                await self._send(answer)
        finally:
            self._running.pop(frame.id, None)
            if not offers:
                self._streams.drop(frame.id)

    async def _answer(self, frame: HandleFrame, context: _Context) -> Frame:
        handler = self._handlers.get(frame.slot)
        if handler is None:
            return RefuseFrame(id=frame.id, reason="the client has taken that handler away")
        try:
            made = await run_handler(handler, context.request, self._env, context)
            content = context.content(made.body)
        except Refused as error:
            return RefuseFrame(id=frame.id, reason=str(error) or "the handler refused")
        except Exception as error:
            # The server, and the sandbox behind it, are told of its kind alone.
            _log.warning("the handler %s failed", handler_name(handler), exc_info=error)
            return FailFrame(id=frame.id, kind=type(error).__name__)
        headers = fields_of(made.headers)
        if isinstance(made, Response):
            return RespondFrame(id=frame.id, status=made.status, headers=headers, content=content)
        return SendFrame(
            id=frame.id, method=made.method, url=made.url, headers=headers, content=content
        )


class _Context:
    """What a handler knows besides the request."""

    def __init__(
        self, sandbox_id: str, frame: HandleFrame, streams: ChannelStreams, send: Send
    ) -> None:
        self.sandbox_id = sandbox_id
        self.rule = frame.rule
        body = streams.take(frame.id, 0) if frame.body else None
        self.request = Request(frame.method, frame.url, CIMultiDict(frame.headers), body)
        self._id = frame.id
        self._streams = streams
        self._send = send
        self._numbers = itertools.count(1)
        self._body = self.request.body
        self._forwarded: dict[int, MessageBody] = {}
        self._waiting: dict[int, asyncio.Future[ForwardedFrame]] = {}

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        """Have the server send it, and give the answer as it comes."""
        number = next(self._numbers)
        frame = ForwardFrame(
            id=self._id,
            number=number,
            method=request.method,
            url=request.url,
            headers=fields_of(request.headers),
            content=self.content(request.body),
            to=to,
        )
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(frame)
            told = await waiter
        finally:
            del self._waiting[number]
        body = MessageBody(self._streams.take(self._id, number))
        self._forwarded[number] = body
        return Response(body, told.status, CIMultiDict(told.headers))

    def hear(self, frame: ForwardedFrame | UnforwardedFrame) -> None:
        """Take the answer to a `forward`."""
        waiter = self._waiting.get(frame.number)
        if waiter is None or waiter.done():
            return
        if isinstance(frame, ForwardedFrame):
            waiter.set_result(frame)
        else:
            waiter.set_exception(ConnectionError(frame.reason))

    def content(self, body: MessageBody) -> Content:
        """How the server gets a body: it keeps those that it has, if nobody read them."""
        if (known := body.known) is not None and len(known) <= _INLINE:
            return Content(data=known)
        if known is None and not body.untouched:
            raise ValueError("the body was read, and not kept")
        if body is self._body and known is None:
            return Content(keep=True)
        for number, one in self._forwarded.items():
            if one is body and known is None:
                return Content(of=number)
        stream = next(self._numbers)
        self._streams.offer(self._id, stream, body)
        return Content(stream=stream)
