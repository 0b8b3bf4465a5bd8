"""What holds a jail on a host without cgroups: limits per process, and sums from /proc."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from typing import TYPE_CHECKING

from smokebox.engine.jail import kernfs
from smokebox.engine.jail.api import JailStats
from smokebox.engine.jail.cgroup import Cgroup
from smokebox.sandbox.keeper import descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from smokebox.engine.jail.api import Enforcement
    from smokebox.engine.jail.placement import Placement
    from smokebox.engine.limits import Limits

_SIGNAL_BATCH = 64


class Uncontained(Cgroup):
    """The same for a host without cgroups: `rlimits_for` limits, and /proc counts.

    Nothing limits the sum of a jail's processes here, and nobody counts what was killed.
    The processes are what `pids` lists, and otherwise the attached one and those below it.
    """

    def __init__(
        self, key: str, placement: Placement, pids: Callable[[], Iterable[int]] | None = None
    ) -> None:
        super().__init__(key, placement)
        self._list = pids
        self._first: int | None = None

    def attach(self, pid: int) -> None:
        """Take a process for the first of the jail."""
        self._first = pid

    def pids(self) -> list[int]:
        """The jail's processes, in our numbering."""
        if self._list is not None:
            return list(self._list())
        if self._first is None:
            return []
        alone = [self._first] if kernfs.state(self._first) not in "ZX" else []
        return [*alone, *descendants(self._first)]

    def stats(self) -> JailStats:
        """The sums over its processes: memory by share, cpu with the children they reaped."""
        pids = self.pids()
        return JailStats(
            cpu_seconds=sum(kernfs.cpu_seconds(pid) for pid in pids),
            memory=sum(kernfs.resident(pid) for pid in pids),
            pids=sum(kernfs.threads(pid) for pid in pids),
        )

    def _hold(self, still: bool) -> None:
        number = signal.SIGSTOP if still else signal.SIGCONT
        pids = self.pids()
        for start in range(0, len(pids), _SIGNAL_BATCH):
            self._signal(pids[start : start + _SIGNAL_BATCH], number)

    def _frozen(self) -> bool:
        running = [pid for pid in self.pids() if kernfs.state(pid) not in "TtZX"]
        self._signal(running[:_SIGNAL_BATCH], signal.SIGSTOP)
        return not running

    def _strike(self) -> None:
        pids = self.pids()
        for start in range(0, len(pids), _SIGNAL_BATCH):
            self._signal(pids[start : start + _SIGNAL_BATCH], signal.SIGKILL)

    def _signal(self, pids: list[int], number: int) -> None:
        """Signal those of `pids` that still are the jail's once we hold them."""
        held: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
        still = set(self.pids()) if held else set()
        for pid, fd in held.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid in still:
                    signal.pidfd_send_signal(fd, number)
            os.close(fd)


def rlimits_for(limits: Limits, enforcement: Enforcement) -> dict[int, int]:
    """What `setrlimit` holds every process of a jail to, none above our own hard limits.

    Without cgroups, also how many processes and how much data; not address space, of which
    node and WebAssembly reserve gigabytes that they never use.
    """
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_FSIZE: limits.disk,
    }
    if enforcement == "rlimits":
        wanted |= {resource.RLIMIT_NPROC: limits.pids, resource.RLIMIT_DATA: limits.memory}
    return {kind: _capped(kind, value) for kind, value in wanted.items() if value is not None}


def _capped(kind: int, value: int) -> int:
    _, hard = resource.getrlimit(kind)
    return value if hard == resource.RLIM_INFINITY else min(value, hard)
