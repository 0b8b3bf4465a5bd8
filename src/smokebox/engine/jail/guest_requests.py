"""Short requests to the guest init of a jail, each on a new connection and with a deadline."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_init
from smokebox.engine.jail.network import MAX_EGRESS_SOCKETS, EgressSockets
from smokebox.engine.jail.socket_memory import NETLINK_SOCK_DIAG
from smokebox.errors import SandboxGone
from smokebox.runtime.pipes import readable
from smokebox.runtime.supervisor import FAILED, LENGTH, MESSAGE, receive_fds

if TYPE_CHECKING:
    from smokebox.engine.jail.jail import Jail

RESPONSE_SECONDS = 10.0

_TCP = (socket.SOCK_STREAM, socket.IPPROTO_TCP)
_UDP = (socket.SOCK_DGRAM, socket.IPPROTO_UDP)
# With IPv6 on the host, and without.
_EGRESS_SOCKETS = (
    [(socket.AF_INET6, *_TCP), (socket.AF_INET, *_UDP), (socket.AF_INET6, *_UDP)],
    [(socket.AF_INET, *_TCP), (socket.AF_INET, *_UDP)],
)


async def send_signal(jail: Jail, pid: int, number: int, scope: bytes) -> bool:
    """Send a signal and return whether there was a process to receive it.

    `scope` is `guest_init.LEADER` for the process group of a command, and `TREE` or
    `SUPERVISOR` for the processes of a supervisor or the supervisor itself.
    """
    response, fds = await _request(jail, guest_init.SIGNAL, b"%d" % pid, b"%d" % number, scope)
    _close(fds)
    return response == guest_init.DONE


async def open_root(jail: Jail) -> int:
    """Open the root directory as guest init sees it."""
    response, fds = await _request(jail, guest_init.ROOT)
    if response == guest_init.DONE and len(fds) == 1 and stat.S_ISDIR(os.fstat(fds[0]).st_mode):
        return fds[0]
    _close(fds)
    raise _invalid_response(jail)


async def open_socket(jail: Jail, *, version: int = 4) -> socket.socket:
    """Open an unconnected TCP socket in the network of the jail."""
    response, fds = await _request(jail, guest_init.SOCKET, b"%d" % version)
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    if response == guest_init.DONE and len(fds) == 1 and _kind(fds[0]) == (family, *_TCP):
        sock = socket.socket(fileno=fds[0])
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.setblocking(False)
            return sock
        sock.detach()
    _close(fds)
    raise _invalid_response(jail)


async def open_diagnostics(jail: Jail) -> socket.socket:
    """Open a socket for the diagnostics of the jail's network."""
    response, fds = await _request(jail, guest_init.SOCKET, guest_init.DIAGNOSTICS)
    diagnostics = (socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
    if response == guest_init.DONE and len(fds) == 1 and _kind(fds[0]) == diagnostics:
        return socket.socket(fileno=fds[0])
    _close(fds)
    raise _invalid_response(jail)


async def egress_sockets(jail: Jail) -> EgressSockets:
    """Return duplicates of the egress sockets, which guest init keeps."""
    response, fds = await _request(jail, guest_init.EGRESS_SOCKETS)
    if response == guest_init.DONE and [_kind(fd) for fd in fds] in _EGRESS_SOCKETS:
        return EgressSockets([socket.socket(fileno=fd) for fd in fds])
    _close(fds)
    if not fds:
        return EgressSockets(reason="it was created without egress sockets")
    raise _invalid_response(jail)


async def namespaces(jail: Jail) -> tuple[int, int]:
    """Return descriptors of the user and mount namespaces of the jail.

    Its first process is not dumpable, so /proc does not give them, not even to the engine.
    setns(2) checks their kinds.
    """
    response, fds = await _request(jail, guest_init.NAMESPACES)
    if response == guest_init.DONE and len(fds) == 2:
        return fds[0], fds[1]
    _close(fds)
    raise _invalid_response(jail)


async def attach(jail: Jail) -> socket.socket:
    """Attach an engine to a running jail until the returned connection is closed."""
    control = await jail.connect()
    try:
        response, fds = await _exchange(jail, control, guest_init.ATTACH)
        _close(fds)
        if response != guest_init.DONE:
            raise _invalid_response(jail)
    except BaseException:
        control.close()
        raise
    return control


async def _request(jail: Jail, *fields: bytes) -> tuple[bytes, list[int]]:
    """Send a request, and return the response with its descriptors."""
    with await jail.connect() as control:
        return await _exchange(jail, control, *fields)


async def _exchange(jail: Jail, control: socket.socket, *fields: bytes) -> tuple[bytes, list[int]]:
    body = b"\0".join(fields)
    try:
        async with asyncio.timeout(RESPONSE_SECONDS):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(control, LENGTH.pack(len(body)) + body)
            await readable(control.fileno())
            response, fds = receive_fds(control, MESSAGE.size, MAX_EGRESS_SOCKETS)
    except (TimeoutError, ConnectionError) as error:
        raise SandboxGone(
            f"the guest init of jail {jail.state.key} does not respond.",
            hint="Run the command again: the sandbox restarts.",
            reason="guest init does not respond",
        ) from error
    return (b"" if response[:1] == FAILED else response), fds


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _kind(fd: int) -> tuple[int, int, int] | None:
    """Return the family, type and protocol of an unconnected socket; None for anything else."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return None
    options = (socket.SO_DOMAIN, socket.SO_TYPE, socket.SO_PROTOCOL)
    sock = socket.socket(fileno=fd)
    try:
        family, kind, protocol = (sock.getsockopt(socket.SOL_SOCKET, one) for one in options)
        # A netlink socket without a peer has the address of the kernel as one.
        connected = family != socket.AF_NETLINK and _has_peer(sock)
        return None if connected else (family, kind, protocol)
    finally:
        sock.detach()


def _has_peer(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True


def _invalid_response(jail: Jail) -> SandboxGone:
    return SandboxGone(
        f"the guest init of jail {jail.state.key} sent an invalid response.",
        hint="Destroy the sandbox: a program in it has taken control of its guest init.",
        reason="guest init compromised",
    )
