"""The side of the server: a client that runs handlers, asked over its channel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from smokebox.egress.channel_streams import ChannelStreams
from smokebox.egress.handler import HandlerContext, HandlerFailed, Refused
from smokebox.egress.message import MessageBody, Request, Response
from smokebox.wire.handlers import (
    BrokenFrame,
    Content,
    EndFrame,
    FailFrame,
    Fields,
    ForwardedFrame,
    ForwardFrame,
    FromClient,
    HandleFrame,
    Piece,
    PullFrame,
    RefuseFrame,
    RespondFrame,
    SendFrame,
    ServeFrame,
    ServingFrame,
    StopFrame,
    UnforwardedFrame,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from smokebox.egress.channel_streams import Send

MOST_SLOTS = 4096
_GONE = "the client that has the handler went away"


class RemoteHandlers:
    """A `HandlerRunner` of handlers at the other end of a channel; several requests at a time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._slots: frozenset[str] = frozenset()
        self._streams = ChannelStreams(send)
        self._exchanges: dict[int, _HandlerRequest] = {}
        self._ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._closed = False

    @property
    def slots(self) -> Collection[str]:
        """Which slots the client has a handler for."""
        return self._slots

    async def handle(
        self, slot: str, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Have the client run a handler. Its `env` is that of the client."""
        if self._closed:
            raise Refused(_GONE)
        id = next(self._ids)
        exchange = self._exchanges[id] = _HandlerRequest(request, context)
        has_body = request.body.known != b""
        if has_body:
            self._streams.offer(id, 0, request.body)
        ask = HandleFrame(
            id=id,
            slot=slot,
            rule=context.rule,
            method=request.method,
            url=request.url,
            headers=fields_of(request.headers),
            body=has_body,
        )
        try:
            await self._send(ask)
            return await exchange.answer
        except ConnectionError:
            raise Refused(_GONE) from None
        finally:
            if not exchange.streams:
                self._end(id)

    async def hear(self, frame: FromClient | Piece) -> None:
        """Take what the client says; what is about an exchange that is over is nothing."""
        if isinstance(frame, ServeFrame):
            self._slots = frozenset(frame.slots[:MOST_SLOTS])
            await self._send(ServingFrame(number=frame.number))
        elif isinstance(frame, (PullFrame, StopFrame, BrokenFrame, Piece)):
            self._streams.hear(frame)
        elif (exchange := self._exchanges.get(frame.id)) is not None:
            if isinstance(frame, ForwardFrame):
                exchange.tasks.append(self._streams.spawn(self._forward(exchange, frame)))
            elif not exchange.answer.done():
                self._settle(exchange, frame)

    async def aclose(self) -> None:
        """The channel is gone: what waits for it is refused."""
        self._closed, self._slots = True, frozenset()
        for exchange in self._exchanges.values():
            if not exchange.answer.done():
                exchange.answer.set_exception(Refused(_GONE))
                # Whoever asked may have left by now.
                exchange.answer.exception()
        self._exchanges.clear()
        await self._streams.aclose(_GONE)

    def _settle(
        self, exchange: _HandlerRequest, frame: SendFrame | RespondFrame | RefuseFrame | FailFrame
    ) -> None:
        answer = exchange.answer
        if isinstance(frame, RefuseFrame):
            answer.set_exception(Refused(frame.reason))
        elif isinstance(frame, FailFrame):
            answer.set_exception(HandlerFailed(frame.kind))
        else:
            try:
                answer.set_result(self._made(exchange, frame))
            except ValueError as error:
                answer.set_exception(HandlerFailed(str(error)))

    def _made(
        self, exchange: _HandlerRequest, frame: SendFrame | RespondFrame
    ) -> Request | Response:
        body = self._body(exchange, frame.id, frame.content)
        if frame.content.stream is not None:
            # Until the last of it was read, or nobody can read it any more.
            exchange.streams = True
            weakref.finalize(body, self._end_soon, frame.id).atexit = False
        if isinstance(frame, RespondFrame):
            response = Response(body, frame.status)
            response.headers.extend(frame.headers)
            return response
        # The very request that was asked about: its body may be the one that it came with.
        request = exchange.request
        request.method, request.url, request.body = frame.method, frame.url, body
        request.headers = CIMultiDict(frame.headers)
        return request

    def _body(self, exchange: _HandlerRequest, id: int, content: Content) -> MessageBody:
        if content.keep:
            return exchange.request.body
        if content.of is not None:
            found = exchange.forwarded.get(content.of)
            if found is None:
                raise ValueError("it answered with what was never forwarded")
            return found.body
        if content.stream is not None:
            return MessageBody(self._until_end(id, self._streams.take(id, content.stream)))
        return MessageBody(content.data)

    async def _until_end(self, id: int, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        finally:
            self._end(id)

    async def _forward(self, exchange: _HandlerRequest, frame: ForwardFrame) -> None:
        id, number = frame.id, frame.number
        try:
            body = self._body(exchange, id, frame.content)
            request = Request(frame.method, frame.url, CIMultiDict(frame.headers), body)
            response = await exchange.context.forward(request, to=frame.to)
        except Exception as error:
            reason = str(error) or type(error).__name__
            with contextlib.suppress(ConnectionError):
                await self._send(UnforwardedFrame(id=id, number=number, reason=reason))
            return
        exchange.forwarded[number] = response
        self._streams.offer(id, number, response.body)
        headers = fields_of(response.headers)
        told = ForwardedFrame(id=id, number=number, status=response.status, headers=headers)
        with contextlib.suppress(ConnectionError):
            await self._send(told)

    def _end_soon(self, id: int) -> None:
        # Garbage is collected on any thread, and after the end of a loop.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, id)

    def _end(self, id: int) -> None:
        exchange = self._exchanges.pop(id, None)
        if exchange is None:
            return
        for task in exchange.tasks:
            task.cancel()
        self._streams.drop(id)
        # A client that has said all it had to say knows by itself.
        if not self._closed and (exchange.streams or not exchange.answered):
            self._streams.spawn(self._tell_end(id))

    async def _tell_end(self, id: int) -> None:
        with contextlib.suppress(ConnectionError):
            await self._send(EndFrame(id=id))


class _HandlerRequest:
    """One request that a client was asked about."""

    def __init__(self, request: Request, context: HandlerContext) -> None:
        self.request = request
        self.context = context
        self.answer: asyncio.Future[Request | Response] = asyncio.get_running_loop().create_future()
        self.forwarded: dict[int, Response] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.streams = False

    @property
    def answered(self) -> bool:
        """Whether the client has said what is to become of it."""
        return self.answer.done() and not self.answer.cancelled()


def fields_of(headers: CIMultiDict[str]) -> Fields:
    """Headers as a frame has them."""
    return [(str(name), value) for name, value in headers.items()]
