"""Responses of a guest init that a program of the sandbox controls."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest

from smokebox.engine.jail import guest_init, guest_requests
from smokebox.errors import SandboxGone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smokebox.engine.jail.jail import Jail

STREAM, DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM


@dataclass(frozen=True, slots=True)
class HostileJail:
    """A jail whose guest init responds to any request with descriptors of its choice."""

    fds: tuple[int, ...]

    @property
    def state(self) -> HostileJail:
        return self

    @property
    def key(self) -> str:
        return "hostile"

    async def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        threading.Thread(target=self._respond, args=(theirs,)).start()
        return ours

    def _respond(self, control: socket.socket) -> None:
        with control:
            control.recv(1 << 16)
            socket.send_fds(control, [guest_init.DONE], self.fds)


@contextlib.contextmanager
def jail_with(*sockets: socket.socket) -> Iterator[Jail]:
    """Return a jail that responds with sockets, and check that none stays open here."""
    before = set(os.listdir("/proc/self/fd"))
    yield cast("Jail", HostileJail(tuple(sock.fileno() for sock in sockets)))
    for thread in threading.enumerate():
        if thread.daemon is False and thread is not threading.current_thread():
            thread.join(0.2)
    left = set(os.listdir("/proc/self/fd")) - before
    for sock in sockets:
        sock.close()
    # Others may be closed meanwhile, by the collector for example.
    assert not left


def listening() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


def connected() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    # To itself, which TCP allows.
    sock.connect(sock.getsockname())
    return sock


INVALID: dict[str, Callable[[], socket.socket]] = {
    "udp": lambda: socket.socket(type=DATAGRAM),
    "udp over ipv6": lambda: socket.socket(socket.AF_INET6, DATAGRAM),
    "listening": listening,
    "connected": connected,
    "ipv6": lambda: socket.socket(socket.AF_INET6),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
}


@pytest.mark.parametrize("kind", INVALID)
async def test_socket_of_another_kind_is_refused(kind: str) -> None:
    with jail_with(INVALID[kind]()) as jail:
        with pytest.raises(SandboxGone, match="invalid response") as caught:
            await guest_requests.open_socket(jail)
        assert caught.value.fields["reason"] == "guest init compromised"


async def test_number_of_sockets_must_be_right() -> None:
    for count in (0, 2):
        with (
            jail_with(*(socket.socket() for _ in range(count))) as jail,
            pytest.raises(SandboxGone, match="invalid response"),
        ):
            await guest_requests.open_socket(jail)


@pytest.mark.parametrize(("version", "family"), [(4, socket.AF_INET), (6, socket.AF_INET6)])
async def test_unconnected_tcp_socket_is_accepted(version: int, family: int) -> None:
    with jail_with(socket.socket(family)) as jail:
        sock = await guest_requests.open_socket(jail, version=version)
        assert (sock.family, sock.type, sock.getblocking()) == (family, STREAM, False)
        sock.close()


@pytest.mark.parametrize("kind", [*INVALID, "tcp"])
async def test_egress_sockets_of_other_kinds_are_refused(kind: str) -> None:
    first = socket.socket() if kind == "tcp" else INVALID[kind]()
    # In place of the UDP socket for DNS a TCP socket, and in place of the first one any.
    others = [socket.socket(type=STREAM if kind in ("tcp", "listening") else DATAGRAM)]
    with jail_with(first, *others) as jail, pytest.raises(SandboxGone, match="invalid response"):
        await guest_requests.egress_sockets(jail)


async def test_egress_sockets_may_listen() -> None:
    with jail_with(listening(), socket.socket(type=DATAGRAM)) as jail:
        found = await guest_requests.egress_sockets(jail)
        assert len(found.sockets) == 2
        found.close()
