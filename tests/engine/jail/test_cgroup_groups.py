"""Groups of cgroups, which share the CPU weight of one jail: what is created, moved and removed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.jail.cgroup import GROUP
from smokebox.engine.jail.cgroup_hierarchy import CgroupPlacement, Hierarchy, detect
from smokebox.errors import InvalidOption
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.jail.cgroup import Cgroup

pytestmark = pytest.mark.skipif(
    "cpu" not in detect().placement.parents, reason=f"no weights: {detect().describe()}"
)
MANY = f"{GROUP}mine-many"
V2 = detect().enforcement == "cgroup-v2"


@pytest.fixture
def hierarchy() -> Iterator[Hierarchy]:
    found, suffix = detect().placement, f"-groups-{os.getpid()}"
    hierarchy = Hierarchy(
        dataclasses.replace(
            found,
            core=found.core and found.core + suffix,
            parents={name: parent + suffix for name, parent in found.parents.items()},
        )
    )
    yield hierarchy
    hierarchy.sweep([], prefix="")
    for directory in hierarchy.placement.directories:
        with suppress(FileNotFoundError):
            os.rmdir(directory)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as process:
        yield process
        process.kill()


def cpu(hierarchy: Hierarchy) -> Path:
    """Return the directory of the hierarchy that divides the CPU."""
    return Path(hierarchy.placement.parents["cpu"])


def members(directory: Path) -> list[int]:
    return [int(line) for line in (directory / "cgroup.procs").read_text().split()]


def weight(directory: Path) -> int:
    """Return the weight of a cgroup, where 1 is that of a new one."""
    for name, default in (("cpu.weight", 100), ("cpu.shares", 1024)):
        with suppress(FileNotFoundError):
            return int((directory / name).read_text()) // default
    pytest.fail("no weight")


def test_members_and_their_group_have_the_weight_of_one_jail(hierarchy: Hierarchy) -> None:
    hierarchy.create("mine-1", Limits(), MANY)
    hierarchy.create("mine-2", Limits())
    found = [cpu(hierarchy) / name for name in (MANY, f"{MANY}/mine-1", "mine-2")]
    assert [weight(one) for one in found] == [1, 1, 1]


def cores(directory: Path) -> float | None:
    """Return the limit of cores of a cgroup."""
    with suppress(FileNotFoundError):
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota = (directory / "cpu.cfs_quota_us").read_text()
    return None if int(quota) < 0 else int(quota) / 100_000


def test_members_of_a_group_have_a_limit_together(hierarchy: Hierarchy) -> None:
    hierarchy.create("mine-1", Limits(), MANY)
    found = [cpu(hierarchy) / name for name in (MANY, f"{MANY}/mine-1")]
    assert [cores(one) for one in found] == [None, None]
    hierarchy.placement.limit_group(MANY, 0.5)
    assert [cores(one) for one in found] == [0.5, None]
    hierarchy.placement.limit_group(MANY, None)
    assert [cores(one) for one in found] == [None, None]


def test_member_keeps_a_limit_above_that_of_its_group(hierarchy: Hierarchy) -> None:
    hierarchy.create("mine-1", Limits(cpu=2), MANY)
    hierarchy.placement.limit_group(MANY, 0.5)
    assert cores(cpu(hierarchy) / MANY / "mine-1") == 2
    assert cores(cpu(hierarchy) / MANY) == (0.5 if V2 else None)


def test_limit_of_a_group_that_is_gone_is_no_error(hierarchy: Hierarchy) -> None:
    hierarchy.placement.limit_group(MANY, 0.5)
    hierarchy.placement.limit_group("", 0.5)


def test_member_has_its_limits_and_is_frozen_counted_and_killed(
    hierarchy: Hierarchy, process: subprocess.Popen[bytes]
) -> None:
    cgroup = hierarchy.create("mine-1", Limits(memory=1 << 26, pids=20, cpu=0.5), MANY)
    cgroup.attach(process.pid)
    assert process.pid in members(cpu(hierarchy) / MANY / "mine-1")
    cgroup.freeze()
    cgroup.thaw()
    stats = cgroup.stats()
    assert stats.memory is not None
    assert (stats.pids, stats.oom_kills) == (len(cgroup.pids()), 0)
    cgroup.kill()
    assert process.wait(10) < 0
    cgroup.remove()
    assert not (cpu(hierarchy) / MANY).exists()


def test_cgroup_with_processes_joins_a_group(
    hierarchy: Hierarchy, process: subprocess.Popen[bytes]
) -> None:
    cgroup = hierarchy.create("mine-1", Limits())
    cgroup.attach(process.pid)
    before = set(cgroup.pids())
    cgroup.join(MANY)
    cgroup.set_limits(Limits(memory=1 << 26, pids=20, cpu=0.5))
    assert set(members(cpu(hierarchy) / MANY / "mine-1")) >= before
    assert not (cpu(hierarchy) / "mine-1").exists()
    assert set(cgroup.pids()) >= before
    remove(cgroup)
    assert not (cpu(hierarchy) / MANY).exists()


def test_processes_that_fork_join_with_all_their_children(hierarchy: Hierarchy) -> None:
    """Only guest init runs then. That of a jail may still start threads and helpers."""
    loop = "while :; do (sleep 0.001 & sleep 0.002 & wait); done"
    with subprocess.Popen(["sh", "-c", loop], start_new_session=True) as process:
        cgroup = hierarchy.create("mine-1", Limits())
        cgroup.attach(process.pid)
        try:
            cgroup.join(MANY)
            assert not (cpu(hierarchy) / "mine-1").exists()
        finally:
            remove(cgroup)


def test_process_moves_itself_into_a_group(hierarchy: Hierarchy) -> None:
    code = 'read -r tasks; [ -z "$tasks" ] || echo 0 >"$tasks"; echo; exec sleep 60'
    with subprocess.Popen(
        ["sh", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        cgroup = hierarchy.create("mine-1", Limits())
        cgroup.attach(process.pid)
        cgroup.join(MANY, by_itself=True)
        fds = cgroup.open_tasks()
        # In version 2 the process was moved already.
        assert len(fds) == (hierarchy.enforcement == "cgroup-v1")
        process.stdin.write("".join(os.readlink(f"/proc/self/fd/{fd}") for fd in fds) + "\n")
        process.stdin.flush()
        process.stdout.readline()
        for fd in fds:
            os.close(fd)
        assert members(cpu(hierarchy) / MANY / "mine-1") == [process.pid]
        cgroup.finish_join()
        assert not (cpu(hierarchy) / "mine-1").exists()
        assert cgroup.open_tasks() == []
        remove(cgroup)


def test_process_that_did_not_move_itself_is_moved(
    hierarchy: Hierarchy, process: subprocess.Popen[bytes]
) -> None:
    cgroup = hierarchy.create("mine-1", Limits())
    cgroup.attach(process.pid)
    cgroup.join(MANY, by_itself=True)
    cgroup.finish_join()
    assert process.pid in members(cpu(hierarchy) / MANY / "mine-1")
    remove(cgroup)


def remove(cgroup: Cgroup) -> None:
    cgroup.kill()
    cgroup.remove()


def test_group_stays_until_its_last_member_is_removed(hierarchy: Hierarchy) -> None:
    first, second = [hierarchy.create(f"mine-{one}", Limits(), MANY) for one in range(2)]
    first.remove()
    first.remove()
    assert (cpu(hierarchy) / MANY / "mine-1").exists()
    second.remove()
    assert not (cpu(hierarchy) / MANY).exists()


def test_members_are_created_while_others_remove_the_group(hierarchy: Hierarchy) -> None:
    stop, swept = threading.Event(), 0

    def sweep() -> None:
        nonlocal swept
        while not stop.is_set():
            # As engines do with what they do not know.
            hierarchy.sweep([])
            swept += 1

    other = threading.Thread(target=sweep)
    other.start()
    try:
        for _ in range(100):
            hierarchy.create("mine-1", Limits(), MANY).remove()
    finally:
        stop.set()
        other.join()
    assert swept


def test_members_of_a_killed_engine_are_swept_with_their_group(
    hierarchy: Hierarchy, process: subprocess.Popen[bytes]
) -> None:
    hierarchy.create("mine-1", Limits(), MANY).attach(process.pid)
    hierarchy.create("mine-2", Limits(), MANY)
    theirs = f"{GROUP}theirs-many"
    hierarchy.create("theirs-1", Limits(), theirs)
    (cpu(hierarchy) / f"{GROUP}mine-empty").mkdir()
    assert hierarchy.sweep(["mine-2"], prefix="mine-") == ["mine-1"]
    assert process.wait(10) < 0
    groups = {path.name: os.path.isdir(path) for path in cpu(hierarchy).glob(f"{GROUP}*")}
    assert groups == {MANY: True, theirs: True}
    assert not (cpu(hierarchy) / MANY / "mine-1").exists()
    assert hierarchy.sweep([], prefix="mine-") == ["mine-2"]
    assert not (cpu(hierarchy) / MANY).exists()


def test_interrupted_join_leaves_nothing_after_a_sweep(hierarchy: Hierarchy) -> None:
    """The engine was killed between the creation of the second cgroup and the end of the move."""
    hierarchy.create("mine-1", Limits())
    (cpu(hierarchy) / MANY / "mine-1").mkdir(parents=True)
    assert hierarchy.sweep([], prefix="mine-") == ["mine-1"]
    for directory in hierarchy.placement.directories:
        assert not [one for one in os.scandir(directory) if one.is_dir()]


def test_adopted_member_is_found(hierarchy: Hierarchy, process: subprocess.Popen[bytes]) -> None:
    hierarchy.create("mine-1", Limits(), MANY).attach(process.pid)
    adopted = hierarchy.adopt("mine-1", process.pid, MANY)
    assert process.pid in adopted.pids()
    assert adopted.stats().pids
    remove(adopted)
    assert not (cpu(hierarchy) / MANY).exists()


def test_jail_of_an_engine_without_groups_is_adopted_where_it_is(
    hierarchy: Hierarchy, process: subprocess.Popen[bytes]
) -> None:
    hierarchy.create("mine-1", Limits()).attach(process.pid)
    adopted = hierarchy.adopt("mine-1", process.pid)
    assert process.pid in adopted.pids()
    remove(adopted)


def test_key_cannot_name_a_group(hierarchy: Hierarchy) -> None:
    with pytest.raises(InvalidOption, match="invalid name of a cgroup"):
        hierarchy.create(MANY, Limits())


def test_nothing_is_nested_where_nothing_has_weights() -> None:
    placement = CgroupPlacement(enforcement="cgroup-v1", parents={"pids": "/nowhere/pids"})
    assert placement.inside("/nowhere/pids", MANY) == "/nowhere/pids"
    placement.make_group(MANY)
