"""Messages to the kernel by netlink, as bytes, and the answers to them. No policy lives here."""

from __future__ import annotations

import os
import socket
import struct

ROUTE, NETFILTER = 0, 12

REQUEST, ACK, CREATE, EXCLUSIVE, APPEND = 0x1, 0x4, 0x400, 0x200, 0x800
NESTED = 0x8000

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR = 2
_READ = 1 << 16


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded as the kernel wants it."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def message(kind: int, flags: int, body: bytes, *, number: int = 1) -> bytes:
    """One message with its header."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, number, 0) + body


def send(protocol: int, *messages: bytes) -> None:
    """Send messages in one go; raises the first error that the kernel answers with.

    The kernel has answered when `send` returns, so nothing is waited for.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.bind((0, 0))
        sock.send(b"".join(messages))
        while True:
            try:
                answer = sock.recv(_READ, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            _check(answer)


def _check(answer: bytes) -> None:
    place = 0
    while place + _HEADER.size <= len(answer):
        length, kind, _, number, _ = _HEADER.unpack_from(answer, place)
        if kind == _ERROR:
            (error,) = struct.unpack_from("=i", answer, place + _HEADER.size)
            if error:
                raise OSError(-error, f"netlink message {number}: {os.strerror(-error)}")
        place += max(length + 3 & ~3, _HEADER.size)
