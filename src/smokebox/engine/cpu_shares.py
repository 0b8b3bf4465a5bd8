"""Shares of the CPU: the same for each group of sandboxes, however many of them are awake.

The kernel divides a busy CPU by the weights of cgroups. The awake sandboxes of a group divide the
weight of one sandbox among them; one without a group has it alone. An idle CPU is for everyone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from smokebox.engine.jail.cgroup import CPU_WEIGHT
from smokebox.errors import SandboxGone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.engine.jail.jail import Jail

# Changes of this time are written together: many sandboxes of a group may wake at once.
COALESCE_SECONDS = 0.1


def weight_of(members: int) -> int:
    """Return the weight of each sandbox of a group."""
    return max(1, round(CPU_WEIGHT / members))


class CpuShares:
    """The awake sandboxes of each group, and the weights that were written for them."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[Jail, int | None]] = {}
        self._changed: set[str] = set()
        self._writing: asyncio.Task[None] | None = None

    def add(self, group: str, jail: Jail, *, adopted: bool = False) -> None:
        """Add a sandbox that is awake. The cgroup of an adopted one may have any weight."""
        if group:
            self._groups.setdefault(group, {})[jail] = None if adopted else CPU_WEIGHT
            self._change(group)

    def remove(self, group: str, jail: Jail) -> None:
        """Remove a sandbox that ends."""
        members = self._groups.get(group, {})
        if jail in members:
            del members[jail]
            self._change(group)

    async def aclose(self) -> None:
        """Stop writing weights. What keeps running keeps its own."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def _change(self, group: str) -> None:
        self._changed.add(group)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_changes())

    async def _write_changes(self) -> None:
        while self._changed:
            await asyncio.sleep(COALESCE_SECONDS)
            changed, self._changed = self._changed, set()
            weights = [pair for group in changed for pair in self._plan(group)]
            if weights:
                await asyncio.to_thread(_write, weights)

    def _plan(self, group: str) -> list[tuple[Jail, int]]:
        """Return the weights of a group that differ from the written ones."""
        members = self._groups[group]
        if not members:
            del self._groups[group]
            return []
        weight = weight_of(len(members))
        jails = [jail for jail, written in members.items() if written != weight]
        members.update(dict.fromkeys(jails, weight))
        return [(jail, weight) for jail in jails]


def _write(weights: Iterable[tuple[Jail, int]]) -> None:
    for jail, weight in weights:
        # One that ends meanwhile needs none, and a kernel that refuses keeps equal weights.
        with contextlib.suppress(SandboxGone, OSError):
            jail.set_cpu_weight(weight)
