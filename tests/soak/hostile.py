"""The hostile tenant of a soak test: hostile.py SETUP, with phases on the standard input.

It attacks in hostile windows only. Prints `ready`, and at the end a `HostileReport`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec

from smokebox.errors import SmokeboxError
from soak.attacks import ATTACKS, Hostile
from soak.plan import Phases, Setup, owned, report

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class HostileReport(msgspec.Struct, kw_only=True):
    """Refusals by code, and errors that should not have happened."""

    refusals: dict[str, int] = {}
    errors: list[str] = []


async def attack_in_windows(hostile: Hostile, phases: Phases, names: tuple[str, ...]) -> None:
    """Run the attacks in every hostile window, and clean up after each."""
    while True:
        await phases.wait_for(hostile=True)
        tasks = [asyncio.create_task(_attack(hostile, ATTACKS[name])) for name in names]
        async with owned(*tasks):
            await phases.wait_for(hostile=False)
        await hostile.clean()


async def _attack(hostile: Hostile, attack: Callable[[Hostile], Awaitable[None]]) -> None:
    """Begin an attack again when it cannot be prepared, as beside others that fill its quotas."""
    task = asyncio.current_task()
    assert task is not None
    # A task group that is cancelled while one of its tasks fails raises that failure instead.
    while not task.cancelling():
        try:
            await attack(hostile)
        except* (SmokeboxError, OSError):
            hostile.refusals["setup"] = hostile.refusals.get("setup", 0) + 1
            await asyncio.sleep(0.5)
        except* Exception as group:
            hostile.errors.append(f"{attack.__name__}: {group!r:.500}")
            await asyncio.sleep(1.0)


async def main() -> None:
    """Attack until the input ends."""
    setup, phases = msgspec.json.decode(sys.argv[1], type=Setup), Phases()
    hostile = Hostile(setup)
    await hostile.prepare()
    report("ready")
    async with owned(asyncio.create_task(attack_in_windows(hostile, phases, setup.attacks))):
        await phases.follow()
    await hostile.clean()
    await hostile.client.aclose()
    report(HostileReport(refusals=hostile.refusals, errors=hostile.errors))


if __name__ == "__main__":
    asyncio.run(main())
