"""Shares of the CPU: the same for each group of sandboxes, however many of them are busy.

The kernel divides a busy CPU by the weights of cgroups. The busy sandboxes of a group divide the
weight of one sandbox among them; one without a group has it alone. An idle CPU is for everyone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from smokebox.engine.jail.cgroup import CPU_WEIGHT
from smokebox.errors import SandboxGone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.engine.jail.jail import Jail

SAMPLE_SECONDS = 1.0
# Many sandboxes of a group may wake at once.
COALESCE_SECONDS = 0.1
# A sandbox that uses this share of one CPU is busy, and stays so for a while: with pauses between
# its programs, a group would have more than its weight again and again.
BUSY_SHARE = 0.05
BUSY_SECONDS = 10.0


def weight_of(busy: int) -> int:
    """Return the weight of each sandbox of a group."""
    return max(1, round(CPU_WEIGHT / max(1, busy)))


class _Member:
    """An awake sandbox: its written weight, and the CPU time that it has used."""

    def __init__(self, jail: Jail, weight: int | None) -> None:
        self.jail = jail
        self.weight = weight
        self._used = 0.0
        self._measured_at = 0.0
        self._busy_until = 0.0

    def is_busy(self, now: float) -> bool:
        """Measure it, and tell whether it is busy. Blocks briefly."""
        used = self.jail.cpu_seconds()
        if used is None:
            return True
        if self._measured_at and used - self._used > BUSY_SHARE * (now - self._measured_at):
            self._busy_until = now + BUSY_SECONDS
        self._used, self._measured_at = used, now
        return now < self._busy_until

    def set_weight(self, weight: int) -> None:
        """Write its weight, unless it was written before. Blocks briefly."""
        if self.weight != weight:
            self.weight = weight
            # One that ends meanwhile needs none, and a kernel that refuses keeps equal weights.
            with contextlib.suppress(SandboxGone, OSError):
                self.jail.set_cpu_weight(weight)


class _Group:
    """The awake sandboxes of a group, and the weight of each."""

    def __init__(self) -> None:
        self.members: dict[Jail, _Member] = {}
        self.weight = CPU_WEIGHT

    def measure(self, now: float) -> None:
        """Change its weight to that for its busy sandboxes. Blocks briefly."""
        members = list(self.members.values())
        busy = sum(one.is_busy(now) for one in members) if len(members) > 1 else 1
        self.weight = weight_of(busy)


class CpuShares:
    """The awake sandboxes of each group, which are measured every second."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._added = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def add(self, group: str, jail: Jail, *, adopted: bool = False) -> None:
        """Add a sandbox that is awake. The cgroup of an adopted one may have any weight."""
        if group:
            found = self._groups.setdefault(group, _Group())
            found.members[jail] = _Member(jail, None if adopted else CPU_WEIGHT)
            self._added.set()
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch())

    def remove(self, group: str, jail: Jail) -> None:
        """Remove a sandbox that ends."""
        if (found := self._groups.get(group)) is not None:
            found.members.pop(jail, None)
            if not found.members:
                del self._groups[group]

    async def aclose(self) -> None:
        """Stop writing weights. What keeps running keeps its own."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        """Write the weights of added sandboxes soon, and measure all regularly."""
        measure_at = 0.0
        while self._groups:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, measure_at - time.monotonic())):
                    await self._added.wait()
                    await asyncio.sleep(COALESCE_SECONDS)
            self._added.clear()
            groups, now = list(self._groups.values()), time.monotonic()
            if now >= measure_at:
                measure_at = now + SAMPLE_SECONDS
                await asyncio.to_thread(_measure, groups, now)
            await asyncio.to_thread(_write, groups)


def _measure(groups: Iterable[_Group], now: float) -> None:
    for group in groups:
        group.measure(now)


def _write(groups: Iterable[_Group]) -> None:
    for group in groups:
        for member in list(group.members.values()):
            member.set_weight(group.weight)
