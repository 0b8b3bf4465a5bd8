"""What goes over the WebSocket by which the handlers of a client are asked.

Text frames are objects whose `type` says what they are. Bodies go as binary frames: the
number of an exchange and that of a stream in it, four bytes each with the highest first, and
a piece; without one, the stream has ended. A body is sent as far as `pull` has asked for it,
so that one which nobody reads costs nothing. A stream has its number from whoever sends it:
from the server 0 is the body of the request, and N that of the answer to `forward` N.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from smokebox.wire.frames import Frame

Fields: TypeAlias = list[tuple[str, str]]

_PREFIX = struct.Struct(">II")
LARGEST_PIECE = 256 * 1024


class Content(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of a message: that of the request (`keep`), of the answer to a `forward`
    (`of`), a stream of the client, bytes, or none."""

    keep: bool = False
    of: int | None = None
    stream: int | None = None
    data: bytes = b""


class ServeFrame(Frame, tag="serve"):
    """From the client: which slots it has handlers for; answered with the same number."""

    number: int
    slots: list[str]


class ServingFrame(Frame, tag="serving"):
    """From the server: the slots of that `serve` are served."""

    number: int


class HandleFrame(Frame, tag="handle"):
    """From the server: what is to become of a request? `body` says whether it has one."""

    id: int
    slot: str
    rule: str
    method: str
    url: str
    headers: Fields
    body: bool


class EndFrame(Frame, tag="end"):
    """From the server: an exchange is over, whatever the client is at."""

    id: int


class SendFrame(Frame, tag="send"):
    """From the client: send the request so."""

    id: int
    method: str
    url: str
    headers: Fields
    content: Content


class RespondFrame(Frame, tag="respond"):
    """From the client: answer the request so."""

    id: int
    status: int
    headers: Fields
    content: Content


class RefuseFrame(Frame, tag="refuse"):
    """From the client: refuse the request."""

    id: int
    reason: str


class FailFrame(Frame, tag="fail"):
    """From the client: the handler failed, with an error of that kind."""

    id: int
    kind: str


class ForwardFrame(Frame, tag="forward"):
    """From the client: send this meanwhile, and tell of the answer."""

    id: int
    number: int
    method: str
    url: str
    headers: Fields
    content: Content
    to: str | None = None


class ForwardedFrame(Frame, tag="forwarded"):
    """From the server: the answer to a `forward`."""

    id: int
    number: int
    status: int
    headers: Fields


class UnforwardedFrame(Frame, tag="unforwarded"):
    """From the server: there is no answer to a `forward`."""

    id: int
    number: int
    reason: str


class PullFrame(Frame, tag="pull"):
    """So many more bytes of a stream may be sent."""

    id: int
    stream: int
    size: int


class StopFrame(Frame, tag="stop"):
    """No more of a stream is wanted."""

    id: int
    stream: int


class BrokenFrame(Frame, tag="broken"):
    """A stream has ended before its time."""

    id: int
    stream: int
    reason: str


StreamFrame: TypeAlias = PullFrame | StopFrame | BrokenFrame
FromClient: TypeAlias = (
    ServeFrame | SendFrame | RespondFrame | RefuseFrame | FailFrame | ForwardFrame | StreamFrame
)
FromServer: TypeAlias = (
    ServingFrame | HandleFrame | EndFrame | ForwardedFrame | UnforwardedFrame | StreamFrame
)


class Piece(msgspec.Struct):
    """A piece of a stream."""

    id: int
    stream: int
    data: bytes

    def pack(self) -> bytes:
        """As a binary frame."""
        return _PREFIX.pack(self.id, self.stream) + self.data

    @classmethod
    def unpack(cls, frame: bytes) -> Piece:
        """From a binary frame. Raises ValueError for one that is too short."""
        if len(frame) < _PREFIX.size:
            raise ValueError("a binary frame begins with two numbers")
        id, stream = _PREFIX.unpack_from(frame)
        return cls(id, stream, frame[_PREFIX.size :])


_from_client: msgspec.json.Decoder[FromClient] = msgspec.json.Decoder(FromClient)
_from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


def from_client(frame: str | bytes) -> FromClient | Piece:
    """What a client sent. Raises ValueError, of which `msgspec.DecodeError` is one."""
    return Piece.unpack(frame) if isinstance(frame, bytes) else _from_client.decode(frame)


def from_server(frame: str | bytes) -> FromServer | Piece:
    """What a server sent. Raises ValueError."""
    return Piece.unpack(frame) if isinstance(frame, bytes) else _from_server.decode(frame)
