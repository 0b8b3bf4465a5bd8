"""The user at the other end of a TCP connection on this machine, as the kernel tells it.

One request to NETLINK_SOCK_DIAG (sock_diag(7)) looks the peer's socket up by its four addresses.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import asyncio

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

PEER = "smokebox.peer"
"""Key in the scope of a request of the `Peer` that sent it."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
# struct nlmsghdr, struct inet_diag_req_v2 up to its sockid, and struct inet_diag_sockid.
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_REST = struct.Struct("=III")
_NO_COOKIE = 0xFFFFFFFF
_ALL_STATES = 0xFFFFFFFF
# struct inet_diag_msg: family, state, timer, retrans; its sockid; numbers, with uid and inode last.
_MESSAGE = struct.Struct("=BBBB")
_NUMBERS = struct.Struct("=IIIII")
_SOCKID = 48
# TCP states of a socket that a program may still have open. Others have no owner any more.
_OPEN_STATES = frozenset((1, 4, 5, 8))  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
_SECONDS = 1.0


class _Found(NamedTuple):
    state: int
    local: tuple[Address, int]
    remote: tuple[Address, int]
    uid: int
    inode: int


class Peer:
    """The other end of a connection. Its user is looked up at most once."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    @property
    def address(self) -> str | None:
        """The IP address; None for a connection that is not TCP."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else None

    @functools.cached_property
    def trusted(self) -> bool:
        """True for the user of this process and for root, if the kernel can tell."""
        uid = peer_uid(self._transport)
        return uid is not None and uid in (0, os.geteuid())


def peer_uid(transport: asyncio.BaseTransport) -> int | None:
    """Return the uid that owns the other end of a connection; None if it cannot be known.

    It cannot for another machine or network namespace, nor once the peer has closed its socket.
    """
    remote, local = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    if not (isinstance(remote, tuple) and isinstance(local, tuple)):
        return None
    try:
        return find_uid((_address(remote[0]), remote[1]), (_address(local[0]), local[1]))
    except (OSError, ValueError, struct.error):
        return None


def find_uid(local: tuple[Address, int], remote: tuple[Address, int]) -> int | None:
    """Return the owner of the TCP socket of this machine with these ends, or None.

    Raises:
        OSError: The kernel has no socket diagnostics.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_SECONDS)
        netlink.sendto(_request(local, remote), (0, 0))
        data, sender = netlink.recvfrom(1 << 16)
    found = _parse(data) if sender[0] == 0 else None
    # The kernel answers for a listening socket where there is no other, and for a closed one with
    # uid 0 and without an inode.
    if (
        found is None
        or found.state not in _OPEN_STATES
        or not found.inode
        or (found.local, found.remote) != (local, remote)
    ):
        return None
    return None if found.uid == _overflow_uid() else found.uid


def _request(local: tuple[Address, int], remote: tuple[Address, int]) -> bytes:
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    sockid = (
        _PORTS.pack(local[1], remote[1])
        + local[0].packed.ljust(16, b"\0")
        + remote[0].packed.ljust(16, b"\0")
        + _REST.pack(0, _NO_COOKIE, _NO_COOKIE)
    )
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES) + sockid
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    return header + body


def _parse(data: bytes) -> _Found | None:
    """Parse the first message; None if it is an error, such as for a socket that is not there."""
    length, kind, *_ = _HEADER.unpack_from(data)
    if kind != _SOCK_DIAG_BY_FAMILY or length > len(data):
        return None
    family, state, _, _ = _MESSAGE.unpack_from(data, _HEADER.size)
    start = _HEADER.size + _MESSAGE.size
    local_port, remote_port = _PORTS.unpack_from(data, start)
    size = 4 if family == socket.AF_INET else 16
    ends = [data[start + 4 + offset :][:size] for offset in (0, 16)]
    _, _, _, uid, inode = _NUMBERS.unpack_from(data, start + _SOCKID)
    return _Found(
        state,
        (_plain(ipaddress.ip_address(ends[0])), local_port),
        (_plain(ipaddress.ip_address(ends[1])), remote_port),
        uid,
        inode,
    )


def _address(text: str) -> Address:
    return _plain(ipaddress.ip_address(text.partition("%")[0]))


def _plain(address: Address) -> Address:
    """Return the IPv4 address in ::ffff:127.0.0.1, which is how the kernel looks it up."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _overflow_uid() -> int | None:
    """Return the uid that stands for all users without one in this user namespace, if there are."""
    with open("/proc/self/uid_map") as file:
        if sum(int(line.split()[2]) for line in file) >= (1 << 32) - 1:
            return None
    with open("/proc/sys/kernel/overflowuid") as file:
        return int(file.read())
