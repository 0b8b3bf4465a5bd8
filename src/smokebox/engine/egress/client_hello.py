"""The first message of TLS, as far as it says which server is wanted."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from smokebox.egress.pattern import normal_host

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_RECORD, _MESSAGE = 5, 4
LONGEST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHello:
    """What the first bytes of a connection are.

    `missing` is how many more it takes to tell. `tls` says that they are a client's first
    message, and `sni` the name of the server in it.
    """

    tls: bool = False
    sni: str | None = None
    missing: int = 0


def read_hello(data: bytes) -> ClientHello:
    """What the first bytes of a connection are, of which there may be more."""
    if data[:1] != bytes([_HANDSHAKE]) or data[1:2] not in (b"", b"\x03"):
        return ClientHello() if data else ClientHello(missing=1)
    message, place, wanted = b"", 0, _MESSAGE
    while len(message) < wanted:
        if len(data) < place + _RECORD:
            return _more(place + _RECORD - len(data), len(data))
        kind, _, length = struct.unpack_from("!BHH", data, place)
        piece = data[place + _RECORD : place + _RECORD + length]
        if kind != _HANDSHAKE or not length:
            return ClientHello()
        if len(piece) < length:
            return _more(length - len(piece), len(data))
        message += piece
        place += _RECORD + length
        if len(message) >= _MESSAGE:
            wanted = _MESSAGE + int.from_bytes(message[1:_MESSAGE], "big")
            if message[0] != _CLIENT_HELLO or wanted > LONGEST:
                return ClientHello()
    try:
        return ClientHello(tls=True, sni=_server_name(message[_MESSAGE:wanted]))
    except (IndexError, struct.error):
        return ClientHello()


def _more(missing: int, have: int) -> ClientHello:
    return ClientHello(missing=missing) if have + missing <= LONGEST else ClientHello()


def _server_name(body: bytes) -> str | None:
    """The name in the body of a client's hello; raises IndexError where it ends too soon."""
    place = 2 + 32
    place += 1 + body[place]
    place += 2 + struct.unpack_from("!H", body, place)[0]
    place += 1 + body[place]
    if place == len(body):
        return None
    end = place + 2 + struct.unpack_from("!H", body, place)[0]
    place += 2
    while place < end:
        kind, length = struct.unpack_from("!HH", body, place)
        if kind == _SERVER_NAME:
            entry, size = struct.unpack_from("!BH", body, place + 6)
            name = body[place + 9 : place + 9 + size]
            if entry != _HOST_NAME or len(name) != size or not name.isascii():
                return None
            return normal_host(name.decode()) or None
        place += 4 + length
    return None
