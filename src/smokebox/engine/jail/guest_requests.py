"""Short requests to the guest init of a jail, each on a new connection and with a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_init
from smokebox.engine.jail.network import MAX_EGRESS_SOCKETS, EgressSockets
from smokebox.errors import SandboxGone
from smokebox.runtime.pipes import readable
from smokebox.runtime.supervisor import FAILED, LENGTH, MESSAGE, receive_fds

if TYPE_CHECKING:
    from smokebox.engine.jail.jail import Jail

RESPONSE_SECONDS = 10.0

_STREAM, _DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM
# With IPv6 on the host, and without.
_EGRESS_SOCKETS = (
    [
        (socket.AF_INET6, _STREAM),
        (socket.AF_INET, _DATAGRAM),
        (socket.AF_INET6, _DATAGRAM),
    ],
    [(socket.AF_INET, _STREAM), (socket.AF_INET, _DATAGRAM)],
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
    if response == guest_init.DONE and len(fds) == 1 and stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
        sock = socket.socket(fileno=fds[0])
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setblocking(False)
            return sock
        sock.close()
        fds = []
    _close(fds)
    raise _invalid_response(jail)


async def egress_sockets(jail: Jail) -> EgressSockets:
    """Return duplicates of the egress sockets, which guest init keeps."""
    response, fds = await _request(jail, guest_init.EGRESS_SOCKETS)
    sockets = [socket.socket(fileno=fd) for fd in fds if stat.S_ISSOCK(os.fstat(fd).st_mode)]
    kinds = [(sock.family, sock.type) for sock in sockets]
    if response == guest_init.DONE and len(sockets) == len(fds) and kinds in _EGRESS_SOCKETS:
        return EgressSockets(sockets)
    for sock in sockets:
        sock.detach()
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


def _invalid_response(jail: Jail) -> SandboxGone:
    return SandboxGone(
        f"the guest init of jail {jail.state.key} sent an invalid response.",
        hint="Destroy the sandbox: a program in it has taken control of its guest init.",
        reason="guest init compromised",
    )
