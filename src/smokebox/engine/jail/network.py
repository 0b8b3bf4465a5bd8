"""The network of a jail: a closed room whose doors are sockets of ours.

There is a loopback and no other interface. Every address is local to it, so that there is a
way to each and none leads out; rules turn all TCP and all DNS to sockets that are made
here and served by the engine. Other UDP is refused, as nobody listens.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from smokebox.engine.jail import linux, nft
from smokebox.engine.jail.netlink import (
    ACK,
    CREATE,
    EXCLUSIVE,
    REQUEST,
    ROUTE,
    attribute,
    message,
    send,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# The sandbox's own: programs do not look for addresses by IPv4 where they have none.
ADDRESS = "10.11.0.2"
# What programs do not want for themselves: of TCP and of UDP.
PORT = 1
MOST_DOORS = 4

_LOOPBACK = 1
# Of IPv4 and of IPv6 alike.
_ORIGINAL_DESTINATION = 80
_NEW_ADDRESS, _NEW_ROUTE = 20, 24
_TABLE_LOCAL, _PROTOCOL_STATIC, _SCOPE_HOST, _TYPE_LOCAL = 255, 4, 254, 2
_MADE = REQUEST | ACK | CREATE | EXCLUSIVE


class Doors:
    """The sockets that lead out of a jail: where all TCP arrives, and where DNS does.

    Without any, `reason` says why.
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
        """All of them, in the order that makes them again."""
        return [] if self.tcp is None else [self.tcp, *self.dns]

    def take(self, others: Doors) -> None:
        """Be those others."""
        self.tcp, self.dns, self.reason = others.tcp, others.dns, others.reason

    def release(self) -> Doors:
        """The same, for another to close; here there are none left."""
        released = Doors(self.sockets, reason=self.reason)
        self.tcp, self.dns = None, ()
        return released

    def close(self) -> None:
        """Let go of them."""
        for sock in self.sockets:
            sock.close()


def prepare() -> None:
    """Have what `furnish` says to the kernel ready: all that are forked from here share it."""
    nft.rules(port=PORT, own=ADDRESS)


def furnish() -> Doors:
    """Make the network of this namespace, which has nothing yet.

    Where the kernel has no nf_tables there is a loopback, and no way out.
    """
    linux.raise_loopback()
    try:
        nft.redirect(port=PORT, own=ADDRESS)
    except OSError as error:
        return Doors(reason=f"this kernel does not let us turn connections (nf_tables): {error}")
    own = socket.inet_aton(ADDRESS)
    address = struct.pack("=BBBBi", socket.AF_INET, 32, 0, 0, _LOOPBACK)
    address += attribute(2, own) + attribute(1, own)
    to_all = _everything(socket.AF_INET, attribute(7, own))
    send(ROUTE, message(_NEW_ADDRESS, _MADE, address), to_all)
    sockets = [_bound(socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1")]
    try:
        send(ROUTE, _everything(socket.AF_INET6))
        sockets.append(_bound(socket.AF_INET6, socket.SOCK_DGRAM, "::1"))
        listener = _bound(socket.AF_INET6, socket.SOCK_STREAM, "::")
    except OSError:
        # A host without IPv6: there is no way to such addresses.
        listener = _bound(socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1")
    return Doors([listener, *sockets])


def destination(sock: socket.socket) -> tuple[str, int] | None:
    """Where a connection that came to the door wanted to go; None where nobody can tell."""
    for level in (socket.SOL_IP, socket.IPPROTO_IPV6):
        with contextlib.suppress(OSError):
            return read_destination(sock.getsockopt(level, _ORIGINAL_DESTINATION, 28))
    return None


def read_destination(found: bytes) -> tuple[str, int]:
    """The address and the port in what the kernel has of a socket's address."""
    (port,) = struct.unpack_from("!H", found, 2)
    if struct.unpack_from("=H", found) == (socket.AF_INET,):
        return socket.inet_ntop(socket.AF_INET, found[4:8]), port
    return socket.inet_ntop(socket.AF_INET6, found[8:24]), port


def _everything(family: int, source: bytes = b"") -> bytes:
    """The route by which every address is ours."""
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
    return message(_NEW_ROUTE, _MADE, route + device + source)


def _bound(family: int, kind: int, address: str) -> socket.socket:
    """A socket in its place. One for TCP does not listen yet: what comes is refused at once."""
    sock = socket.socket(family, kind)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, kind != socket.SOCK_STREAM)
        sock.bind((address, PORT))
    except OSError:
        sock.close()
        raise
    return sock
