"""The ids of sandboxes on the host: a range of 64k for each, held by a lock that dies with it."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass

from smokebox.engine.jail import linux
from smokebox.engine.jail.api import Owner
from smokebox.errors import LimitReached

FIRST, LAST, COUNT = 0x50000000, 0x6FFF0000, 0x10000

_NEEDED = (linux.CAP_SYS_ADMIN, linux.CAP_SETUID, linux.CAP_SETGID, linux.CAP_DAC_OVERRIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class UidRange:
    """Who the root of one jail is outside, and what holds that against other engines."""

    owner: Owner
    lock: socket.socket | None = None

    def close(self) -> None:
        """Let go of the lock; the jail holds a copy for as long as it lives."""
        if self.lock is not None:
            self.lock.close()


def privileged() -> bool:
    """Whether this process can give a sandbox ids that are not its own."""
    if os.geteuid() != 0 or not (_has_all("uid_map") and _has_all("gid_map")):
        return False
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("CapEff:"))
    mask = int(line.split()[1], 16)
    return all(mask >> capability & 1 for capability in _NEEDED)


def _has_all(name: str) -> bool:
    """Whether the ids that sandboxes get are there: root of a container may have a few only."""
    with open(f"/proc/self/{name}") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= FIRST and first + count >= LAST + COUNT for first, _, count in ranges)


def take(*, privileged: bool) -> UidRange:
    """A range of ids that no other sandbox on this host has, or just our own.

    The lock is a name in the abstract socket namespace of the host: no file is left by a
    jail that was killed, and none inside can reach it.
    """
    if not privileged:
        return UidRange(owner=Owner(uid=os.geteuid(), gid=os.getegid(), count=1))
    for _ in range(1000):
        first = random.randrange(FIRST, LAST, COUNT)
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0smokebox-ids-{first:x}")
        except OSError:
            lock.close()
            continue
        return UidRange(owner=Owner(uid=first, gid=first, count=COUNT), lock=lock)
    raise LimitReached(
        "no range of user ids is free for another sandbox on this host.",
        hint="Destroy sandboxes that are not needed.",
        limit="ids",
    )
