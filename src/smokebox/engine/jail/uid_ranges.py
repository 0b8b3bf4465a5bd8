"""Ranges of user ids for sandboxes: 64k ids each, held by a lock that goes with the sandbox."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass

from smokebox.engine.jail import linux
from smokebox.engine.jail.spec import Owner
from smokebox.errors import LimitReached

FIRST, LAST, COUNT = 0x50000000, 0x6FFF0000, 0x10000

_NEEDED = (linux.CAP_SYS_ADMIN, linux.CAP_SETUID, linux.CAP_SETGID, linux.CAP_DAC_OVERRIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class UidRange:
    """The ids of one jail, and the lock that keeps other engines from using them."""

    owner: Owner
    lock: socket.socket | None = None

    def close(self) -> None:
        """Close the lock; the jail holds a duplicate for as long as it runs."""
        if self.lock is not None:
            self.lock.close()


def privileged() -> bool:
    """Return True if this process can map ids other than its own."""
    if os.geteuid() != 0 or not (_maps_all("uid_map") and _maps_all("gid_map")):
        return False
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("CapEff:"))
    mask = int(line.split()[1], 16)
    return all(mask >> capability & 1 for capability in _NEEDED)


def _maps_all(name: str) -> bool:
    """Return True if the ids of sandboxes exist: root of a container may have only a few."""
    with open(f"/proc/self/{name}") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= FIRST and first + count >= LAST + COUNT for first, _, count in ranges)


def allocate(*, privileged: bool) -> UidRange:
    """Allocate ids that no other sandbox on this host uses; without privileges, our own id.

    The lock is a name in the abstract socket namespace of the host: a killed jail leaves no file,
    and no program inside can reach it.
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
