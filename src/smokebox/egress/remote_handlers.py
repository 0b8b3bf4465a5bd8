"""Server side of the handler channel: handlers that run in the process of a connected client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from typing import TYPE_CHECKING, Any, cast

from multidict import CIMultiDict

from smokebox.egress.channel_streams import ChannelStreams
from smokebox.egress.handler import HandlerContext, HandlerFailed, Refused
from smokebox.egress.message import MessageBody, Request, Response
from smokebox.wire.handlers import (
    BrokenFrame,
    Content,
    FailFrame,
    Fields,
    ForwardedFrame,
    ForwardFrame,
    FromClient,
    HandleFrame,
    Piece,
    PullFrame,
    RefuseFrame,
    RequestEndFrame,
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
    from smokebox.egress.outbound import OutboundCall

MAX_SLOTS = 4096
_DISCONNECTED = "the client of the handler disconnected"


class RemoteHandlers:
    """`HandlerRunner` of a connected client; several requests at a time.

    `trusted` lets the client forward requests to every address, as operators may.
    """

    def __init__(self, send: Send, *, trusted: bool) -> None:
        self._send = send
        self._trusted = trusted
        self._slots: frozenset[str] = frozenset()
        self._streams = ChannelStreams(send)
        self._calls: dict[int, _RemoteCall] = {}
        self._ids = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._closed = False

    @property
    def slots(self) -> Collection[str]:
        """Slots that the client has a handler for."""
        return self._slots

    async def handle(
        self, slot: str, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Run the handler of a slot in the client, with the client's `env`."""
        if self._closed:
            raise Refused(_DISCONNECTED)
        id = next(self._ids)
        call = self._calls[id] = _RemoteCall(request, context)
        has_body = request.body.data != b""
        if has_body:
            self._streams.offer(id, 0, request.body)
        frame = HandleFrame(
            id=id,
            slot=slot,
            rule=context.rule,
            method=request.method,
            url=request.url,
            headers=fields_of(request.headers),
            body=has_body,
        )
        try:
            await self._send(frame)
            return await call.result
        except ConnectionError:
            raise Refused(_DISCONNECTED) from None
        finally:
            if not call.streams:
                self._end(id)

    async def receive(self, frame: FromClient | Piece) -> None:
        """Handle a frame of the client. Frames about requests that have ended are ignored."""
        if isinstance(frame, ServeFrame):
            self._slots = frozenset(frame.slots[:MAX_SLOTS])
            await self._send(ServingFrame(number=frame.number))
        elif isinstance(frame, (PullFrame, StopFrame, BrokenFrame, Piece)):
            self._streams.receive(frame)
        elif (call := self._calls.get(frame.id)) is not None:
            if isinstance(frame, ForwardFrame):
                call.tasks.append(self._streams.spawn(self._forward(call, frame)))
            elif not call.result.done():
                self._settle(call, frame)

    async def aclose(self) -> None:
        """Refuse all requests, because the channel is closed."""
        self._closed, self._slots = True, frozenset()
        for call in self._calls.values():
            if not call.result.done():
                call.result.set_exception(Refused(_DISCONNECTED))
                # Otherwise asyncio logs that it was never retrieved, if the caller is gone.
                call.result.exception()
        self._calls.clear()
        await self._streams.aclose(_DISCONNECTED)

    def _settle(
        self, call: _RemoteCall, frame: SendFrame | RespondFrame | RefuseFrame | FailFrame
    ) -> None:
        if isinstance(frame, RefuseFrame):
            call.result.set_exception(Refused(frame.reason))
        elif isinstance(frame, FailFrame):
            call.result.set_exception(HandlerFailed(frame.kind))
        else:
            try:
                call.result.set_result(self._decode(call, frame))
            except ValueError as error:
                call.result.set_exception(error)

    def _decode(self, call: _RemoteCall, frame: SendFrame | RespondFrame) -> Request | Response:
        body = self._body(call, frame.id, frame.content)
        if frame.content.stream is not None:
            # The call ends when the body was read, or is garbage.
            call.streams = True
            weakref.finalize(body, self._end_soon, frame.id).atexit = False
        if isinstance(frame, RespondFrame):
            response = Response(body, frame.status)
            response.headers.extend(frame.headers)
            return response
        # Edit the original request: its body may be the one that it came with.
        request = call.request
        request.method, request.url, request.body = frame.method, frame.url, body
        request.headers = CIMultiDict(frame.headers)
        return request

    def _body(self, call: _RemoteCall, id: int, content: Content) -> MessageBody:
        if content.keep:
            return call.request.body
        if content.of is not None:
            found = call.forwarded.get(content.of)
            if found is None:
                raise ValueError("the client responded with a response that it never got")
            return found.body
        if content.stream is not None:
            return MessageBody(self._until_end(id, self._streams.open(id, content.stream)))
        return MessageBody(content.data)

    async def _until_end(self, id: int, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        finally:
            self._end(id)

    async def _forward(self, call: _RemoteCall, frame: ForwardFrame) -> None:
        id, number = frame.id, frame.number
        try:
            body = self._body(call, id, frame.content)
            request = Request(frame.method, frame.url, CIMultiDict(frame.headers), body)
            # On a server, this is the context of every handler.
            context = cast("OutboundCall", call.context)
            response = await context.forward(request, to=frame.to, trusted=self._trusted)
        except Exception as error:
            reason = str(error) or type(error).__name__
            with contextlib.suppress(ConnectionError):
                await self._send(UnforwardedFrame(id=id, number=number, reason=reason))
            return
        call.forwarded[number] = response
        self._streams.offer(id, number, response.body)
        headers = fields_of(response.headers)
        with contextlib.suppress(ConnectionError):
            await self._send(
                ForwardedFrame(id=id, number=number, status=response.status, headers=headers)
            )

    def _end_soon(self, id: int) -> None:
        # Called by the garbage collector: on any thread, maybe after the loop has ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, id)

    def _end(self, id: int) -> None:
        call = self._calls.pop(id, None)
        if call is None:
            return
        for task in call.tasks:
            task.cancel()
        self._streams.drop(id)
        # A client that has sent its result, and no stream, has ended the request itself.
        if not self._closed and (call.streams or not call.has_result):
            self._streams.spawn(self._send_end(id))

    async def _send_end(self, id: int) -> None:
        with contextlib.suppress(ConnectionError):
            await self._send(RequestEndFrame(id=id))


class _RemoteCall:
    """One request that a client handles.

    `streams` is True while the client sends the body of its result.
    """

    def __init__(self, request: Request, context: HandlerContext) -> None:
        self.request = request
        self.context = context
        self.result: asyncio.Future[Request | Response] = asyncio.get_running_loop().create_future()
        self.forwarded: dict[int, Response] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.streams = False

    @property
    def has_result(self) -> bool:
        """True once the client has sent its result."""
        return self.result.done() and not self.result.cancelled()


def fields_of(headers: CIMultiDict[str]) -> Fields:
    """Return headers as frames have them."""
    return [(str(name), value) for name, value in headers.items()]
