"""The rules that lead what leaves a network namespace to sockets of our own, for nf_tables.

They are one message of netlink: there is no program to call, and nothing on the host.
"""

from __future__ import annotations

import functools
import socket
import struct

from smokebox.engine.jail.netlink import (
    APPEND,
    CREATE,
    EXCLUSIVE,
    NESTED,
    NETFILTER,
    REQUEST,
    attribute,
    message,
    send,
)

_TABLE, _CHAIN = b"smokebox\0", b"out\0"
_BATCH_BEGIN, _BATCH_END, _SUBSYSTEM = 0x10, 0x11, 10
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 3, 6
_FAMILY_ANY, _FAMILY_INET = 0, 1
_HOOK_OUTPUT, _PRIORITY_NAT, _ACCEPT = 3, -100, 1
_REGISTER, _VERDICT = 8, 0
_META_FAMILY, _META_PROTOCOL = 15, 16
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_TCP, _UDP = bytes([socket.IPPROTO_TCP]), bytes([socket.IPPROTO_UDP])
_DNS = 53


def redirect(*, port: int, own: str) -> None:
    """Lead all TCP, and UDP to port 53, to `port` of the loopback.

    What goes to a loopback address, or to the address `own`, goes there.
    """
    send(NETFILTER, rules(port=port, own=own))


@functools.cache
def rules(*, port: int, own: str) -> bytes:
    """The message with which `redirect` asks for that. Writing it takes as long as sending it."""
    v4 = _matches(_meta(_META_FAMILY), bytes([socket.AF_INET]))
    v6 = _matches(_meta(_META_FAMILY), bytes([socket.AF_INET6]))
    tcp = _matches(_meta(_META_PROTOCOL), _TCP)
    udp = _matches(_meta(_META_PROTOCOL), _UDP)
    to = _redirect_to(port)
    loopback = socket.inet_pton(socket.AF_INET6, "::1")
    lines = (
        v4 + _matches(_payload(_NETWORK_HEADER, 16, 1), b"\x7f") + _accept(),
        v4 + _matches(_payload(_NETWORK_HEADER, 16, 4), socket.inet_aton(own)) + _accept(),
        v6 + _matches(_payload(_NETWORK_HEADER, 24, 16), loopback) + _accept(),
        tcp + to,
        udp + _matches(_payload(_TRANSPORT_HEADER, 2, 2), struct.pack("!H", _DNS)) + to,
    )
    hook = attribute(1, _number(_HOOK_OUTPUT)) + attribute(2, _number(_PRIORITY_NAT))
    chain = (
        attribute(1, _TABLE)
        + attribute(3, _CHAIN)
        + attribute(4 | NESTED, hook)
        + attribute(5, _number(_ACCEPT))
        + attribute(7, b"nat\0")
    )
    bodies = [(_NEW_TABLE, attribute(1, _TABLE) + attribute(2, _number(0))), (_NEW_CHAIN, chain)]
    for rule in lines:
        place = attribute(1, _TABLE) + attribute(2, _CHAIN)
        bodies.append((_NEW_RULE, place + attribute(4 | NESTED, rule)))
    return _batch(bodies)


def _batch(bodies: list[tuple[int, bytes]]) -> bytes:
    """All of it or nothing, in one transaction."""
    made = CREATE | EXCLUSIVE
    messages = [
        message(
            _SUBSYSTEM << 8 | kind,
            REQUEST | made | (APPEND if kind == _NEW_RULE else 0),
            _head(_FAMILY_INET) + body,
            number=number,
        )
        for number, (kind, body) in enumerate(bodies, 1)
    ]
    begin = message(_BATCH_BEGIN, REQUEST, _head(_FAMILY_ANY, _SUBSYSTEM), number=0)
    end = message(_BATCH_END, REQUEST, _head(_FAMILY_ANY, _SUBSYSTEM), number=len(bodies) + 1)
    return b"".join([begin, *messages, end])


def _head(family: int, resource: int = 0) -> bytes:
    return struct.pack("!BBH", family, 0, resource)


def _number(value: int) -> bytes:
    return struct.pack("!I", value & 0xFFFFFFFF)


def _expression(name: bytes, data: bytes) -> bytes:
    return attribute(1, attribute(1, name + b"\0") + attribute(2 | NESTED, data))


def _meta(key: int) -> bytes:
    return _expression(b"meta", attribute(1, _number(_REGISTER)) + attribute(2, _number(key)))


def _payload(base: int, offset: int, length: int) -> bytes:
    numbers = (_REGISTER, base, offset, length)
    data = b"".join(attribute(kind, _number(value)) for kind, value in enumerate(numbers, 1))
    return _expression(b"payload", data)


def _matches(loaded: bytes, value: bytes) -> bytes:
    data = attribute(1, _number(_REGISTER)) + attribute(2, _number(0))
    return loaded + _expression(b"cmp", data + attribute(3 | NESTED, attribute(1, value)))


def _accept() -> bytes:
    verdict = attribute(2 | NESTED, attribute(1, _number(_ACCEPT)))
    return _expression(
        b"immediate", attribute(1, _number(_VERDICT)) + attribute(2 | NESTED, verdict)
    )


def _redirect_to(port: int) -> bytes:
    data = attribute(1, _number(_REGISTER))
    data += attribute(2 | NESTED, attribute(1, struct.pack("!H", port)))
    how = attribute(1, _number(_REGISTER)) + attribute(3, _number(2))
    return _expression(b"immediate", data) + _expression(b"redir", how)
