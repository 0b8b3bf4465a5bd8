"""Parser of the TLS ClientHello, for the server name (SNI) in it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from smokebox.egress.pattern import normal_host

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4
MAX_HELLO = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHello:
    """Result of parsing the first bytes of a connection.

    `missing` is the number of bytes needed to decide. `tls` is True for a ClientHello, and `sni`
    is the server name in it.
    """

    tls: bool = False
    sni: str | None = None
    missing: int = 0


def read_hello(data: bytes) -> ClientHello:
    """Parse the first bytes of a connection, after which more may follow."""
    if data[:1] != bytes([_HANDSHAKE]) or data[1:2] not in (b"", b"\x03"):
        return ClientHello() if data else ClientHello(missing=1)
    message, position, size = b"", 0, _MESSAGE_HEADER
    while len(message) < size:
        if len(data) < position + _RECORD_HEADER:
            return _need(position + _RECORD_HEADER - len(data), len(data))
        kind, _, length = struct.unpack_from("!BHH", data, position)
        piece = data[position + _RECORD_HEADER : position + _RECORD_HEADER + length]
        if kind != _HANDSHAKE or not length:
            return ClientHello()
        if len(piece) < length:
            return _need(length - len(piece), len(data))
        message += piece
        position += _RECORD_HEADER + length
        if len(message) >= _MESSAGE_HEADER:
            size = _MESSAGE_HEADER + int.from_bytes(message[1:_MESSAGE_HEADER], "big")
            if message[0] != _CLIENT_HELLO or size > MAX_HELLO:
                return ClientHello()
    try:
        return ClientHello(tls=True, sni=_server_name(message[_MESSAGE_HEADER:size]))
    except (IndexError, struct.error):
        return ClientHello()


def _need(missing: int, present: int) -> ClientHello:
    return ClientHello(missing=missing) if present + missing <= MAX_HELLO else ClientHello()


def _server_name(body: bytes) -> str | None:
    """Return the name in the body of a ClientHello. Raises IndexError if it is truncated."""
    # Version and random, then session id, cipher suites and compression methods.
    position = 2 + 32
    position += 1 + body[position]
    position += 2 + struct.unpack_from("!H", body, position)[0]
    position += 1 + body[position]
    if position == len(body):
        return None
    end = position + 2 + struct.unpack_from("!H", body, position)[0]
    position += 2
    while position < end:
        kind, length = struct.unpack_from("!HH", body, position)
        if kind == _SERVER_NAME:
            entry, size = struct.unpack_from("!BH", body, position + 6)
            name = body[position + 9 : position + 9 + size]
            if entry != _HOST_NAME or len(name) != size or not name.isascii():
                return None
            return normal_host(name.decode()) or None
        position += 4 + length
    return None
