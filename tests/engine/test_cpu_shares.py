"""Shares of the CPU: a group of sandboxes has that of one, however many of them are awake."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.cpu_shares import weight_of
from smokebox.engine.host import Host
from smokebox.engine.jail.cgroup import CPU_WEIGHT
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.kernfs import number

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.options import CheckedOptions
    from smokebox.engine.sandbox import Sandbox

CPU = detect().placement.parents.get("cpu")
V2 = detect().enforcement == "cgroup-v2"
needs_cpu = pytest.mark.skipif(CPU is None, reason=f"no weights here: {detect().describe()}")
SPIN = "while :; do :; done"


@contextlib.asynccontextmanager
async def admit(id: str, options: CheckedOptions) -> AsyncIterator[CheckedOptions]:
    """Take the first word of an id as its group."""
    group, dash, _ = id.partition("-")
    yield replace(options, group=group if dash else None)


@contextlib.asynccontextmanager
async def open_host(tmp_path: Path, layers: Path, pool: int = 0) -> AsyncIterator[Host]:
    home = tmp_path / "home"
    async with await Host.open(home, pool=pool, images=layers, admit=admit) as host:
        yield host


def weight(sandbox: Sandbox) -> int | None:
    run = sandbox.lifecycle.run
    assert run is not None
    return number(f"{CPU}/{run.jail.state.key}/{'cpu.weight' if V2 else 'cpu.shares'}")


def expected(members: int) -> int:
    return max(1, round(100 / members)) if V2 else weight_of(members)


async def until_weights(members: int, *sandboxes: Sandbox) -> None:
    """Wait until sandboxes have the weight of one in a group of so many."""
    try:
        async with asyncio.timeout(10):
            while [weight(one) for one in sandboxes] != [expected(members)] * len(sandboxes):
                await asyncio.sleep(0.02)
    except TimeoutError:
        assert [weight(one) for one in sandboxes] == [expected(members)] * len(sandboxes)


@pytest.mark.parametrize("members", [1, 2, 3, 8, 100, 512])
def test_members_of_a_group_have_the_weight_of_one_sandbox_together(members: int) -> None:
    assert weight_of(members) * members == pytest.approx(CPU_WEIGHT, rel=0.05)


def test_weight_of_a_member_is_never_zero() -> None:
    assert weight_of(100_000) == 1


@needs_cpu
async def test_weights_follow_wake_sleep_and_destroy(tmp_path: Path, layers: Path) -> None:
    async with open_host(tmp_path, layers) as host:
        first, second, third = [await host.create(f"many-{one}") for one in range(3)]
        other, alone = await host.create("one-0"), await host.create("alone")
        await until_weights(3, first, second, third)
        assert (weight(other), weight(alone)) == (expected(1), expected(1))
        await third.sleep()
        await until_weights(2, first, second)
        await third.wake()
        await until_weights(3, first, second, third)
        await second.destroy()
        await until_weights(2, first, third)
        await first.destroy()
        await until_weights(1, third)


@needs_cpu
async def test_weights_follow_a_sandbox_that_ends_by_itself(tmp_path: Path, layers: Path) -> None:
    async with open_host(tmp_path, layers) as host:
        first, second = [await host.create(f"many-{one}") for one in range(2)]
        await until_weights(2, first, second)
        run = second.lifecycle.run
        assert run is not None
        await run.jail.kill()
        await until_weights(1, first)


@needs_cpu
async def test_sandbox_from_the_pool_gets_the_weight_of_its_group(
    tmp_path: Path, layers: Path
) -> None:
    async with open_host(tmp_path, layers, pool=2) as host:
        await host.prime()
        await until_weights(2, *[await host.create(f"many-{one}") for one in range(2)])


@needs_cpu
async def test_adopted_sandboxes_share_the_weight_of_their_group(
    tmp_path: Path, layers: Path
) -> None:
    async with open_host(tmp_path, layers) as host:
        sandboxes = [await host.create(f"many-{one}") for one in range(3)]
        await until_weights(3, *sandboxes)
        # While there is no engine, nothing changes the weights.
        await sandboxes[2].sleep()
        await host.aclose(detach=True)
    async with open_host(tmp_path, layers) as host:
        adopted = [host.sandbox(f"many-{one}") for one in range(2)]
        await until_weights(2, *adopted)


@needs_cpu
async def test_busy_sandboxes_of_one_group_leave_another_its_share(
    tmp_path: Path, layers: Path
) -> None:
    """With equal weights of sandboxes, the single one would get a fifth of that of the others."""
    async with open_host(tmp_path, layers) as host:
        single = await host.create("one-0")
        many = [await host.create(f"many-{one}") for one in range(8)]
        await until_weights(8, *many)
        for sandbox in (single, *many):
            for _ in range(2):
                await sandbox.start_process(SPIN)
        used = await cpu_seconds_of(single, *many)
    assert used[0] >= 0.5 * sum(used[1:]), used


async def cpu_seconds_of(*sandboxes: Sandbox) -> list[float]:
    """Return the CPU time of each in two seconds, or until it is enough to compare."""
    before = await cpu_seconds(*sandboxes)
    for _ in range(5):
        await asyncio.sleep(2)
        now = await cpu_seconds(*sandboxes)
        used = [end - start for start, end in zip(before, now, strict=True)]
        if sum(used) > 0.5:
            break
    return used


async def cpu_seconds(*sandboxes: Sandbox) -> list[float]:
    found = []
    for sandbox in sandboxes:
        run = sandbox.lifecycle.run
        assert run is not None
        seconds = (await run.jail.stats()).cpu_seconds
        assert seconds is not None
        found.append(seconds)
    return found
