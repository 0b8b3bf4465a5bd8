"""The network of a jail: a loopback whose traffic ends in sockets that the engine serves.

There is no interface but the loopback. Every address is local to it, so every destination has a
route and none leads out. nf_tables rules redirect all TCP and all DNS to sockets made here and
served by the engine. Other UDP is refused, as nothing listens for it. The rules and routes are
netlink messages: no helper program runs, and the host's own firewall is not touched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct

from smokebox.engine.jail import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

ROUTE, NETFILTER = 0, 12

REQUEST, ACK, CREATE, EXCLUSIVE, APPEND = 0x1, 0x4, 0x400, 0x200, 0x800
NESTED = 0x8000

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR = 2
_READ = 1 << 16
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
# Address of the sandbox: programs resolve IPv4 addresses only if the host has one.
ADDRESS = "10.11.0.2"
# Port of the egress sockets, TCP and UDP: one that programs do not use.
PORT = 1
MAX_EGRESS_SOCKETS = 4

_LOOPBACK = 1
# SO_ORIGINAL_DST, the same for IPv4 and IPv6.
_ORIGINAL_DESTINATION = 80
_NEW_ADDRESS, _NEW_ROUTE = 20, 24
_TABLE_LOCAL, _PROTOCOL_STATIC, _SCOPE_HOST, _TYPE_LOCAL = 255, 4, 254, 2
_NEW = REQUEST | ACK | CREATE | EXCLUSIVE


def attribute(kind: int, value: bytes) -> bytes:
    """Encode a netlink attribute with its padding."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(-length % 4)


def message(kind: int, flags: int, body: bytes, *, number: int = 1) -> bytes:
    """Encode a netlink message with its header."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, number, 0) + body


def send(protocol: int, *messages: bytes) -> None:
    """Send messages at once, and raise the first error that the kernel reports.

    The kernel processes messages during `send`, so its responses can be read without waiting.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.bind((0, 0))
        sock.send(b"".join(messages))
        while True:
            try:
                response = sock.recv(_READ, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            _raise_error(response)


def _raise_error(response: bytes) -> None:
    offset = 0
    while offset + _HEADER.size <= len(response):
        length, kind, _, number, _ = _HEADER.unpack_from(response, offset)
        if kind == _ERROR:
            (error,) = struct.unpack_from("=i", response, offset + _HEADER.size)
            if error:
                raise OSError(-error, f"netlink message {number}: {os.strerror(-error)}")
        offset += max(length + 3 & ~3, _HEADER.size)


def redirect(*, port: int, own: str) -> None:
    """Redirect all TCP, and UDP to port 53, to `port` of the loopback.

    Traffic to a loopback address or to the address `own` is not redirected.
    """
    send(NETFILTER, redirect_rules(port=port, own=own))


@functools.cache
def redirect_rules(*, port: int, own: str) -> bytes:
    """Return the message of `redirect`. Encoding it takes as long as sending it."""
    v4 = _matches(_meta(_META_FAMILY), bytes([socket.AF_INET]))
    v6 = _matches(_meta(_META_FAMILY), bytes([socket.AF_INET6]))
    tcp = _matches(_meta(_META_PROTOCOL), _TCP)
    udp = _matches(_meta(_META_PROTOCOL), _UDP)
    to = _redirect_to(port)
    loopback = socket.inet_pton(socket.AF_INET6, "::1")
    rules = (
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
    for rule in rules:
        where = attribute(1, _TABLE) + attribute(2, _CHAIN)
        bodies.append((_NEW_RULE, where + attribute(4 | NESTED, rule)))
    return _batch(bodies)


def _batch(bodies: list[tuple[int, bytes]]) -> bytes:
    """Encode messages as one transaction."""
    messages = [
        message(
            _SUBSYSTEM << 8 | kind,
            REQUEST | CREATE | EXCLUSIVE | (APPEND if kind == _NEW_RULE else 0),
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


class EgressSockets:
    """Sockets at which all TCP and all DNS traffic of a jail arrives.

    If there are none, `reason` says why.
    """

    __slots__ = ("dns", "reason", "tcp")

    def __init__(self, sockets: Sequence[socket.socket] = (), *, reason: str = "") -> None:
        for sock in sockets:
            sock.setblocking(False)
        self.tcp = sockets[0] if sockets else None
        self.dns = tuple(sockets[1:])
        self.reason = reason

    @property
    def sockets(self) -> list[socket.socket]:
        """All sockets, in the order that the constructor takes."""
        return [] if self.tcp is None else [self.tcp, *self.dns]

    def replace(self, others: EgressSockets) -> None:
        """Take over the sockets of `others`."""
        self.tcp, self.dns, self.reason = others.tcp, others.dns, others.reason

    def release(self) -> EgressSockets:
        """Return the sockets, for the caller to close; none are left here."""
        released = EgressSockets(self.sockets, reason=self.reason)
        self.tcp, self.dns = None, ()
        return released

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def prepare() -> None:
    """Encode the messages of `set_up` ahead, for all processes forked later."""
    redirect_rules(port=PORT, own=ADDRESS)


def set_up() -> EgressSockets:
    """Set up the network of a new namespace.

    If the kernel has no nf_tables, there is a loopback and no egress.
    """
    linux.raise_loopback()
    try:
        redirect(port=PORT, own=ADDRESS)
    except OSError as error:
        return EgressSockets(reason=f"this kernel cannot redirect connections (nf_tables): {error}")
    own = socket.inet_aton(ADDRESS)
    address = struct.pack("=BBBBi", socket.AF_INET, 32, 0, 0, _LOOPBACK)
    address += attribute(2, own) + attribute(1, own)
    route = _default_route(socket.AF_INET, attribute(7, own))
    send(ROUTE, message(_NEW_ADDRESS, _NEW, address), route)
    sockets = [_bind(socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1")]
    try:
        send(ROUTE, _default_route(socket.AF_INET6))
        sockets.append(_bind(socket.AF_INET6, socket.SOCK_DGRAM, "::1"))
        listener = _bind(socket.AF_INET6, socket.SOCK_STREAM, "::")
    except OSError:
        # A host without IPv6: such addresses are unreachable.
        listener = _bind(socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1")
    return EgressSockets([listener, *sockets])


def destination(sock: socket.socket) -> tuple[str, int] | None:
    """Return the original address and port of a redirected connection, if the kernel has them."""
    for level in (socket.SOL_IP, socket.IPPROTO_IPV6):
        with contextlib.suppress(OSError):
            return parse_destination(sock.getsockopt(level, _ORIGINAL_DESTINATION, 28))
    return None


def parse_destination(sockaddr: bytes) -> tuple[str, int]:
    """Return the address and port of a `struct sockaddr_in` or `sockaddr_in6`."""
    (port,) = struct.unpack_from("!H", sockaddr, 2)
    if struct.unpack_from("=H", sockaddr) == (socket.AF_INET,):
        return socket.inet_ntop(socket.AF_INET, sockaddr[4:8]), port
    return socket.inet_ntop(socket.AF_INET6, sockaddr[8:24]), port


def _default_route(family: int, source: bytes = b"") -> bytes:
    """Encode the route that makes every address a local one."""
    route = struct.pack(
        "=BBBBBBBBI",
        family,
        0,
        0,
        0,
        _TABLE_LOCAL,
        _PROTOCOL_STATIC,
        _SCOPE_HOST,
        _TYPE_LOCAL,
        0,
    )
    device = attribute(4, struct.pack("=i", _LOOPBACK))
    return message(_NEW_ROUTE, _NEW, route + device + source)


def _bind(family: int, kind: int, address: str) -> socket.socket:
    """Bind a socket. One for TCP does not listen yet: connections are refused at once."""
    sock = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, kind != socket.SOCK_STREAM)
        sock.bind((address, PORT))
    except OSError:
        sock.close()
        raise
    return sock
