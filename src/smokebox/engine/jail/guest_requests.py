"""Short requests to the agent of a jail, each a connection of its own with a deadline."""

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
    from smokebox.engine.jail.api import Jail

ANSWER_SECONDS = 10.0

_STREAM, _DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM
# With IPv6 on the host, and without.
_DOORS = (
    [
        (socket.AF_INET6, _STREAM),
        (socket.AF_INET, _DATAGRAM),
        (socket.AF_INET6, _DATAGRAM),
    ],
    [(socket.AF_INET, _STREAM), (socket.AF_INET, _DATAGRAM)],
)


async def send_signal(jail: Jail, supervisor: int, number: int, *, tree: bool) -> bool:
    """Signal what a supervisor has; False when it has nothing left."""
    target = b"%d" % supervisor
    answer, fds = await _ask(
        jail,
        guest_init.SIGNAL,
        target,
        b"%d" % number,
        guest_init.TREE if tree else guest_init.LEADER,
    )
    _close(fds)
    return answer == guest_init.DONE


async def open_root(jail: Jail) -> int:
    """A descriptor of the root directory as the agent sees it."""
    answer, fds = await _ask(jail, guest_init.ROOT)
    if answer == guest_init.DONE and len(fds) == 1 and stat.S_ISDIR(os.fstat(fds[0]).st_mode):
        return fds[0]
    _close(fds)
    raise _nonsense(jail)


async def open_socket(jail: Jail, *, version: int = 4) -> socket.socket:
    """An unconnected TCP socket in the network of the jail."""
    answer, fds = await _ask(jail, guest_init.SOCKET, b"%d" % version)
    if answer == guest_init.DONE and len(fds) == 1 and stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
        sock = socket.socket(fileno=fds[0])
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setblocking(False)
            return sock
        sock.close()
        fds = []
    _close(fds)
    raise _nonsense(jail)


async def egress_sockets(jail: Jail) -> EgressSockets:
    """The sockets that lead out of the jail, which its agent has kept."""
    answer, fds = await _ask(jail, guest_init.EGRESS_SOCKETS)
    sockets = [socket.socket(fileno=fd) for fd in fds if stat.S_ISSOCK(os.fstat(fd).st_mode)]
    kinds = [(sock.family, sock.type) for sock in sockets]
    if answer == guest_init.DONE and len(sockets) == len(fds) and kinds in _DOORS:
        return EgressSockets(sockets)
    for sock in sockets:
        sock.detach()
    _close(fds)
    if not fds:
        # As an agent says that has none, or that is of a version before this.
        return EgressSockets(reason="it was made without a way out")
    raise _nonsense(jail)


async def namespaces(jail: Jail) -> tuple[int, int]:
    """Descriptors of the user namespace of the jail, and of its mounts.

    Its first process lets nobody look, not even who made it. setns(2) checks what they are.
    """
    answer, fds = await _ask(jail, guest_init.NAMESPACES)
    if answer == guest_init.DONE and len(fds) == 2:
        return fds[0], fds[1]
    _close(fds)
    raise _nonsense(jail)


async def _ask(jail: Jail, *fields: bytes) -> tuple[bytes, list[int]]:
    """Send a request, and give the answer with the descriptors that came along."""
    body = b"\0".join(fields)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            with await jail.connect() as control:
                await loop.sock_sendall(control, LENGTH.pack(len(body)) + body)
                await readable(control.fileno())
                answer, fds = receive_fds(control, MESSAGE.size, MAX_EGRESS_SOCKETS)
    except (TimeoutError, ConnectionError) as error:
        raise SandboxGone(
            f"the agent of jail {jail.state.key} does not answer.",
            hint="Run the command again: the sandbox starts afresh.",
            reason="agent silent",
        ) from error
    return (b"" if answer[:1] == FAILED else answer), fds


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _nonsense(jail: Jail) -> SandboxGone:
    return SandboxGone(
        f"the agent of jail {jail.state.key} answered what no agent of ours would.",
        hint="Destroy the sandbox: something in it has taken the agent over.",
        reason="agent hostile",
    )
