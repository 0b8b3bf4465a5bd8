"""Shares of the CPU: a group of sandboxes has that of one, however many of them are awake."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cpu_groups import NO_WEIGHTS, PARENTS, cgroup, create, directory_for_layers, open_host
from engine.leftovers import find_leftovers
from smokebox.engine.context import tag_of
from smokebox.engine.images.build.builds import BuildRequest
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.kernfs import number
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.engine.host import Host
    from smokebox.engine.options import CheckedOptions
    from smokebox.engine.sandbox import Sandbox

V2 = detect().enforcement == "cgroup-v2"
pytestmark = pytest.mark.skipif(bool(NO_WEIGHTS), reason=NO_WEIGHTS)
SPIN = "while :; do :; done"
MIB = 1 << 20


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A directory that layers can be in, also in user-mode Linux."""
    with directory_for_layers(tmp_path) as base:
        yield base


async def fill_pool(host: Host, size: int) -> None:
    """Fill the pool with jails of the image that was used last."""
    await (await create(host, "first")).destroy()
    async with asyncio.timeout(15):
        while host.pool.ready < size:
            await asyncio.sleep(0.01)


async def create_all(host: Host, group: str, count: int) -> list[Sandbox]:
    return await asyncio.gather(*(create(host, f"{group}-{one}") for one in range(count)))


def group(sandbox: Sandbox) -> str:
    """Return the name of the cgroup that a sandbox shares with others; "" for none."""
    return str(cgroup(sandbox).parent.relative_to(PARENTS["cpu"])).strip(".")


async def test_sandboxes_of_a_group_lie_in_one_cgroup(base: Path) -> None:
    async with open_host(base) as host:
        first, second = await create_all(host, "many", 2)
        other, alone = await create(host, "one-0"), await create(host, "alone")
        assert group(first) == group(second)
        assert len({group(first), group(other), ""}) == 3
        assert group(alone) == ""
        await first.sleep()
        await first.wake()
        (fork,) = await host.fork("many-1", 1, ids=["many-fork"])
        await fork.wake()
        assert group(first) == group(second) == group(fork)


@pytest.mark.parametrize("name", ["../../..", "group-x", "a/b", "\n", "x" * 5000, "ü"])
async def test_group_of_any_name_has_a_cgroup(base: Path, name: str) -> None:
    @contextlib.asynccontextmanager
    async def admit(id: str, options: CheckedOptions) -> AsyncIterator[CheckedOptions]:
        yield replace(options, group=name)

    async with open_host(base, admit=admit) as host:
        sandbox = await create(host, "box")
        assert cgroup(sandbox).parent.parent == Path(PARENTS["cpu"])
        await sandbox.destroy()
        assert find_leftovers(host.home) == []


async def test_last_sandbox_of_a_group_removes_its_cgroup(base: Path) -> None:
    async with open_host(base) as host:
        first, second = await create_all(host, "many", 2)
        directory = cgroup(first).parent
        await first.sleep()
        assert directory.exists()
        await second.destroy()
        assert not directory.exists()
        await first.wake()
        assert cgroup(first).parent == directory
        await first.destroy()
        assert find_leftovers(host.home) == []


async def test_sandboxes_of_a_group_come_and_go_at_once(base: Path) -> None:
    """The last one removes the cgroup of the group while another is created in it."""
    async with open_host(base) as host:

        async def come_and_go(id: str) -> None:
            for _ in range(4):
                sandbox = await create(host, id)
                assert group(sandbox)
                await sandbox.destroy()

        async with asyncio.TaskGroup() as tasks:
            for one in range(4):
                tasks.create_task(come_and_go(f"many-{one}"))
        assert find_leftovers(host.home) == []


async def test_sandbox_from_the_pool_joins_its_group_with_its_limits(base: Path) -> None:
    async with open_host(base, pool=2) as host:
        await fill_pool(host, 2)
        pooled = {path.name for path in Path(PARENTS["cpu"]).glob(f"{tag_of(host.home)}-*")}
        limits = Limits(memory=96 * MIB, cpu=0.5, pids=33)
        first = await create(host, "many-0", limits=limits)
        second = await create(host, "many-1")
        assert {cgroup(one).name for one in (first, second)} == pooled
        assert group(first) == group(second) != ""
        quota = "cpu.max" if V2 else "cpu.cfs_quota_us"
        assert (cgroup(first) / quota).read_text().split()[0] == "50000"
        parts = {name: Path(PARENTS[name], "" if not V2 else group(first)) for name in PARENTS}
        key = cgroup(first).name
        memory = "memory.max" if V2 else "memory.limit_in_bytes"
        assert number(str(parts["memory"] / key / memory)) == 96 * MIB
        assert number(str(parts["pids"] / key / "pids.max")) == 33
        assert (await first.exec("echo works")).stdout == "works\n"
        assert group(first), "a command ran outside of the group"


@pytest.mark.parametrize("pool", [0, 2], ids=["created", "pooled"])
async def test_sandboxes_of_a_group_have_a_limit_of_cores_together(base: Path, pool: int) -> None:
    limits = {"many": 0.3}
    async with open_host(base, pool=pool, group_cpu=limits.get) as host:
        if pool:
            await fill_pool(host, pool)
        boxes, other = await create_all(host, "many", 3), await create(host, "other-0")
        quota = "cpu.max" if V2 else "cpu.cfs_quota_us"
        assert (cgroup(boxes[0]).parent / quota).read_text().split()[0] == "30000"
        assert (cgroup(other).parent / quota).read_text().split()[0] in ("max", "-1")
        started = time.monotonic()
        await asyncio.gather(*(box.exec(SPIN, timeout=1) for box in boxes))
        used = [(await box.stats()).cpu_seconds or 0.0 for box in boxes]
        # What starts the sandboxes counts too.
        assert sum(used) < 0.3 * (time.monotonic() - started) + 0.5
        limits["many"] = 2.0
        await boxes[0].sleep()
        await boxes[0].wake()
        assert (cgroup(boxes[0]).parent / quota).read_text().split()[0] == "200000"


async def test_build_shares_the_cpu_of_its_group(base: Path) -> None:
    dockerfile = "FROM dir:small\nRUN echo begun; kill -STOP $$\n"
    async with open_host(base) as host:
        sandbox = await create(host, "many-0")
        directory = cgroup(sandbox).parent
        for name, parent in (("many", directory), ("", directory.parent)):
            before = keys_in(parent)
            request = BuildRequest(dockerfile=dockerfile, group=name)
            async with contextlib.aclosing(host.builds.run(request)) as events:
                async for event in events:
                    if event.data == "begun\n":
                        break
                (step,) = keys_in(parent) - before
                assert (parent / step / "cgroup.procs").read_text()
        await sandbox.destroy()
        assert not directory.exists()
        assert find_leftovers(host.home) == []


def keys_in(parent: Path) -> set[str]:
    """Return the names of the cgroups of sandboxes in one."""
    return {path.name for path in parent.iterdir() if path.is_dir()}


async def test_adopted_sandboxes_stay_in_their_group(base: Path) -> None:
    async with open_host(base, pool=2) as host:
        await fill_pool(host, 2)
        before = [group(one) for one in await create_all(host, "many", 2)]
        await host.aclose(detach=True)
    async with open_host(base) as host:
        adopted = [host.sandbox(f"many-{one}") for one in range(2)]
        assert [group(one) for one in adopted] == before
        stats = await adopted[0].stats()
        assert stats.memory
        for one in adopted:
            await one.destroy()
        assert find_leftovers(host.home) == []


async def test_working_sandbox_has_the_whole_share_of_its_group(base: Path) -> None:
    """Programs in eight sandboxes of one group do not starve the only one that works in another.

    All run on one CPU, so that their shares do not depend on others. Divided among sandboxes,
    the one would have a ninth; divided by the awake sandboxes of its group, an eleventh.
    """
    async with open_host(base) as host:
        many = await create_all(host, "many", 8)
        mine = await create_all(host, "mine", 10)
        assert len({group(one) for one in many}) == len({group(one) for one in mine}) == 1
        cpu = {min(os.sched_getaffinity(0))}
        working = [mine[0], *many]
        # All begin at once: in a sandbox that computes already, starting another takes long.
        await asyncio.gather(*(one.start_process(f"kill -STOP $$; {SPIN}") for one in working))
        for pid in pids(*working):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(pid, cpu)
        used = await cpu_seconds_of(*working)
    assert used[0] >= 0.4 * sum(used), used


def pids(*sandboxes: Sandbox) -> list[int]:
    """Return all processes of sandboxes."""
    return [pid for one in sandboxes if (run := one.lifecycle.run) for pid in run.jail.pids()]


async def cpu_seconds_of(*sandboxes: Sandbox) -> list[float]:
    """Return the CPU time that each uses until it is enough to compare, once they continue."""
    before = await cpu_seconds(*sandboxes)
    while True:
        for pid in pids(*sandboxes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.2)
        now = await cpu_seconds(*sandboxes)
        used = [end - start for start, end in zip(before, now, strict=True)]
        if sum(used) > 1:
            return used


async def cpu_seconds(*sandboxes: Sandbox) -> list[float]:
    """Return the CPU time of each since it woke."""
    stats = [await one.stats() for one in sandboxes]
    return [one.cpu_seconds or 0.0 for one in stats]
