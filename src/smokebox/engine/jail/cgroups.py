"""Holding jails to their limits: what this host offers for that, found once per process."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING

from smokebox.engine.jail.cgroup import Cgroup, Death
from smokebox.engine.jail.kernfs import read
from smokebox.engine.jail.placement import survey
from smokebox.engine.jail.rlimits import Uncontained, rlimits_for
from smokebox.errors import DeadlineExceeded, IsolationUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection

    from smokebox.engine.jail.api import Enforcement
    from smokebox.engine.jail.placement import Placement
    from smokebox.engine.limits import Limits

__all__ = ["Cgroup", "Death", "Hierarchy", "Uncontained", "detect", "rlimits_for"]

# A cgroup without processes is its engine's until the first one enters, milliseconds later.
IDLE_SECONDS = 60.0


@functools.cache
def detect() -> Hierarchy:
    """What this host offers to this process. Nothing is changed before the first `create`."""
    return Hierarchy(
        survey(
            mountinfo=read("/proc/self/mountinfo"),
            membership=read("/proc/self/cgroup"),
            privileged=os.geteuid() == 0,
        )
    )


class Hierarchy:
    """What holds jails to their limits on this host."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @property
    def enforcement(self) -> Enforcement:
        """Which kind of limits hold here."""
        return self.placement.enforcement

    def describe(self) -> str:
        """What holds and where, or what is missing and how to mend it, for people."""
        return self.placement.describe()

    def create(self, key: str, limits: Limits) -> Cgroup:
        """Make a jail's cgroup and set its limits."""
        cgroup = self._cgroup(key)
        try:
            cgroup.make(limits)
        except OSError as error:
            with contextlib.suppress(OSError):
                cgroup.remove()
            raise IsolationUnavailable(
                f"cannot make the cgroup {key}: {error}",
                hint="`smokebox doctor` says which cgroups this host lets us use.",
                tier="namespaces",
            ) from error
        return cgroup

    def adopt(self, key: str, pid: int) -> Cgroup:
        """The cgroup of a jail that another engine made, whose first process is `pid`."""
        cgroup = self._cgroup(key)
        if isinstance(cgroup, Uncontained):
            cgroup.attach(pid)
        return cgroup

    def sweep(
        self, live: Collection[str], *, prefix: str | None = None, idle: float = IDLE_SECONDS
    ) -> list[str]:
        """Remove what engines that died left behind, and return the keys.

        Several engines may share a host, and each knows only its own jails. With `prefix`,
        which begins the caller's keys and nobody else's, everything of that name but `live`
        is killed. Without, only what holds no process and is older than `idle` is removed.
        """
        swept = []
        for key in sorted(self._keys() - set(live)):
            cgroup = Cgroup(key, self.placement)
            if not (cgroup.abandoned(idle) if prefix is None else key.startswith(prefix)):
                continue
            with contextlib.suppress(DeadlineExceeded):
                cgroup.kill()
                cgroup.remove()
                swept.append(key)
        return swept

    def _cgroup(self, key: str) -> Cgroup:
        kind = Uncontained if self.enforcement == "rlimits" else Cgroup
        return kind(key, self.placement)

    def _keys(self) -> set[str]:
        found: set[str] = set()
        for directory in self.placement.directories:
            with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
                found.update(entry.name for entry in entries if entry.is_dir())
        return found
