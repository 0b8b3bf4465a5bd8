"""WebSockets of the API: a function, and what its signature says of the request.

`@socket("/sandboxes/{id}/terminal")` on `async def view(call, channel, query: OpenTerminal)`
does for a WebSocket what `endpoint` does for a method. Until the function has accepted the
channel an error is an answer by HTTP; after that it is a frame, and closes the socket.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.websockets import WebSocket

from smokebox.errors import InvalidOption, SmokeboxError
from smokebox.server.call import Call
from smokebox.server.decoding import decode_query
from smokebox.server.keepalive import LOST
from smokebox.wire.codec import decode
from smokebox.wire.frames import ErrorFrame, Frame

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive, Scope, Send

F = TypeVar("F", bound=Frame)
Handler = Callable[..., Awaitable[None]]


class Channel:
    """One WebSocket, from the side of the server."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.accepted = False
        self._socket = WebSocket(scope, receive, send)
        self._lost: asyncio.Event = scope.get(LOST) or asyncio.Event()

    async def accept(self) -> None:
        """Begin: from here on errors are frames."""
        await self._socket.accept()
        self.accepted = True

    async def send(self, frame: Frame | bytes) -> None:
        """Send a frame, once the other end has taken most of those before."""
        if isinstance(frame, bytes):
            await self._socket.send_bytes(frame)
        else:
            await self._socket.send_text(msgspec.json.encode(frame).decode())

    async def tell(self, error: SmokeboxError) -> None:
        """Send an error."""
        await self.send(ErrorFrame(message=str(error), code=error.code))

    async def converse(
        self,
        talk: Coroutine[None, None, None],
        hear: Callable[[bytes | str], Awaitable[None]],
    ) -> None:
        """Talk, and hear what comes, until all is said, or the other end has left.

        A frame is read when the one before was heard. One that is wrong is answered by an
        error, and that is all.
        """
        tasks = [
            asyncio.create_task(talk),
            asyncio.create_task(self._listen(hear)),
            asyncio.create_task(self._left()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[0] in done:
            await self._socket.close()

    async def _listen(self, hear: Callable[[bytes | str], Awaitable[None]]) -> None:
        while (message := await self._socket.receive())["type"] == "websocket.receive":
            data: bytes | str | None = message.get("bytes")
            try:
                await hear(data if data is not None else message["text"])
            except SmokeboxError as error:
                await self.tell(error)

    async def _left(self) -> None:
        await self._lost.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """The WebSocket of one path; an ASGI app once `door` has said who asks."""

    path: str
    handler: Handler
    summary: str
    description: str
    query: type | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket. What is wrong before it is accepted is for `door` to answer."""
        request = Request({**scope, "type": "http", "method": "GET"})
        call = Call(request, scope["smokebox.state"], scope["smokebox.principal"])
        arguments: dict[str, Any] = {}
        if self.query is not None:
            arguments["query"] = decode_query(self.query, scope["query_string"])
        await call.find()
        channel = Channel(scope, receive, send)
        try:
            await self.handler(call, channel, **arguments)
        except SmokeboxError as error:
            if channel.accepted:
                await channel.tell(error)
            raise


def socket(path: str) -> Callable[[Handler], Socket]:
    """Make a function a `Socket`. Its docstring says what goes over it."""

    def make(handler: Handler) -> Socket:
        summary, _, description = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")
        return Socket(
            path=path,
            handler=handler,
            summary=" ".join(summary.split()),
            description=" ".join(description.split()),
            query=get_type_hints(handler).get("query"),
        )

    return make


def decode_frame(kind: type[F], text: str) -> F:
    """A text frame as what it is to be."""
    data, wanted = text.encode(), str(kind.__struct_config__.tag)
    try:
        # By itself, as a frame without a type would be taken for one of this.
        if (told := decode(_Typed, data).type) != wanted:
            raise _unwanted(wanted, f"not {told!r:.80}")
        return decode(kind, data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _unwanted(wanted, str(error)) from error


class _Typed(msgspec.Struct):
    type: str


def _unwanted(wanted: str, problem: str) -> InvalidOption:
    return InvalidOption(
        f"text frames of this socket are of the type {wanted!r}: {problem}.",
        hint="Send bytes as binary frames.",
        option="frame",
    )
