"""Frames of the WebSocket over which the server calls the egress handlers of a client.

Text frames are JSON objects whose `type` names their class. Bodies are binary frames: the id of
a handled request and the number of a stream in it, each four bytes, big-endian, and then data;
without data, the stream has ended. A sender sends only as many bytes as `pull` allows, so an
unread body costs nothing. The sender of a stream numbers it: from the server, 0 is the body of
the request, and N the body of the response to `forward` N.
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
    """The body of a message.

    It is the body of the request (`keep`), that of the response to `forward` number `of`, a
    stream of the client, bytes, or nothing.
    """

    keep: bool = False
    of: int | None = None
    stream: int | None = None
    data: bytes = b""


class ServeFrame(Frame, tag="serve"):
    """From the client: the slots it has handlers for. `serving` confirms it by `number`."""

    number: int
    slots: list[str]


class ServingFrame(Frame, tag="serving"):
    """From the server: the slots of the `serve` with this number are served."""

    number: int


class HandleFrame(Frame, tag="handle"):
    """From the server: handle a request. `body` is true if it has one."""

    id: int
    slot: str
    rule: str
    method: str
    url: str
    headers: Fields
    body: bool


class RequestEndFrame(Frame, tag="end"):
    """From the server: the request is over; stop handling it."""

    id: int


class SendFrame(Frame, tag="send"):
    """From the client: send this request upstream."""

    id: int
    method: str
    url: str
    headers: Fields
    content: Content


class RespondFrame(Frame, tag="respond"):
    """From the client: respond to the request with this."""

    id: int
    status: int
    headers: Fields
    content: Content


class RefuseFrame(Frame, tag="refuse"):
    """From the client: refuse the request."""

    id: int
    reason: str


class FailFrame(Frame, tag="fail"):
    """From the client: the handler failed with an error of this class."""

    id: int
    kind: str


class ForwardFrame(Frame, tag="forward"):
    """From the client: send another request while handling this one, and return its response."""

    id: int
    number: int
    method: str
    url: str
    headers: Fields
    content: Content
    to: str | None = None


class ForwardedFrame(Frame, tag="forwarded"):
    """From the server: the response to a `forward`."""

    id: int
    number: int
    status: int
    headers: Fields


class UnforwardedFrame(Frame, tag="unforwarded"):
    """From the server: a `forward` got no response."""

    id: int
    number: int
    reason: str


class PullFrame(Frame, tag="pull"):
    """Allow `size` more bytes of a stream to be sent."""

    id: int
    stream: int
    size: int


class StopFrame(Frame, tag="stop"):
    """Stop sending a stream."""

    id: int
    stream: int


class BrokenFrame(Frame, tag="broken"):
    """A stream broke before its end."""

    id: int
    stream: int
    reason: str


StreamFrame: TypeAlias = PullFrame | StopFrame | BrokenFrame
FromClient: TypeAlias = (
    ServeFrame | SendFrame | RespondFrame | RefuseFrame | FailFrame | ForwardFrame | StreamFrame
)
FromServer: TypeAlias = (
    ServingFrame | HandleFrame | RequestEndFrame | ForwardedFrame | UnforwardedFrame | StreamFrame
)


class Piece(msgspec.Struct):
    """A piece of a stream."""

    id: int
    stream: int
    data: bytes

    def pack(self) -> bytes:
        """Encode it as a binary frame."""
        return _PREFIX.pack(self.id, self.stream) + self.data

    @classmethod
    def unpack(cls, frame: bytes) -> Piece:
        """Decode a binary frame. Raises ValueError if it is too short."""
        if len(frame) < _PREFIX.size:
            raise ValueError("a binary frame begins with two numbers")
        id, stream = _PREFIX.unpack_from(frame)
        return cls(id, stream, frame[_PREFIX.size :])


_from_client: msgspec.json.Decoder[FromClient] = msgspec.json.Decoder(FromClient)
_from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


def from_client(frame: str | bytes) -> FromClient | Piece:
    """Decode a frame from a client. Raises ValueError, which `msgspec.DecodeError` is."""
    return Piece.unpack(frame) if isinstance(frame, bytes) else _from_client.decode(frame)


def from_server(frame: str | bytes) -> FromServer | Piece:
    """Decode a frame from a server. Raises ValueError."""
    return Piece.unpack(frame) if isinstance(frame, bytes) else _from_server.decode(frame)
