"""Cgroups of this host's kernel: limits, accounting, freezing and killing.

Where version 1 has the controllers, limits of version 2 are tested with plain files; freezing,
killing and cloning by version 2 are tested with the kernel everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.jail import linux
from smokebox.engine.jail.cgroup import Cgroup
from smokebox.engine.jail.cgroup_hierarchy import CgroupPlacement, Hierarchy, detect
from smokebox.errors import Conflict, DeadlineExceeded, InvalidOption, LimitReached, SandboxGone
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
NO_LIMITS = Limits(memory=None, cpu=None, pids=None, disk=None, open_files=None)


def placements() -> list[object]:
    """Return every kind of placement of this host, with directories for tests only."""
    found = detect().placement
    if found.enforcement == "rlimits":
        return [pytest.param(found, marks=pytest.mark.skip(detect().describe()))]
    kinds = [found]
    if found.enforcement == "cgroup-v1" and found.core:
        first = {name: f"/sys/fs/cgroup/{name}/smokebox" for name in ("freezer", "cpuacct")}
        if all(os.path.isdir(os.path.dirname(parent)) for parent in first.values()):
            kinds.append(dataclasses.replace(found, core=None, parents={**found.parents, **first}))
    return [renamed(kind) for kind in kinds]


def renamed(placement: CgroupPlacement) -> CgroupPlacement:
    suffix = f"-test-{os.getpid()}"
    return dataclasses.replace(
        placement,
        core=placement.core and placement.core + suffix,
        parents={name: parent + suffix for name, parent in placement.parents.items()},
    )


def placement_id(placement: object) -> str:
    assert isinstance(placement, CgroupPlacement)
    return f"{placement.enforcement}{'-with-core' if placement.core else ''}"


@pytest.fixture(params=placements(), ids=placement_id)
def hierarchy(request: pytest.FixtureRequest) -> Iterator[Hierarchy]:
    hierarchy = Hierarchy(request.param)
    yield hierarchy
    hierarchy.sweep([], prefix="")
    remove_directories(hierarchy)


@pytest.fixture
def core() -> Iterator[Hierarchy]:
    """A cgroup2 mount without controllers, which is enough to freeze and to kill."""
    parent = detect().placement.core
    if parent is None:
        pytest.skip("no writable cgroup2")
    directory = f"{parent}-core-{os.getpid()}"
    hierarchy = Hierarchy(CgroupPlacement(enforcement="cgroup-v2", core=directory))
    os.mkdir(directory)
    yield hierarchy
    hierarchy.sweep([], prefix="")
    remove_directories(hierarchy)


def remove_directories(hierarchy: Hierarchy) -> None:
    for directory in hierarchy.placement.directories:
        with suppress(FileNotFoundError):
            os.rmdir(directory)


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start a process whose Python code waits for `go`."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-Sc", f"import os, sys, time; sys.stdin.readline()\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    process.stdin.write(b"\n")
    process.stdin.flush()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


def directories(cgroup: Cgroup) -> list[str]:
    return [f"{parent}/{cgroup.key}" for parent in cgroup.placement.directories]


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Return a function that reads the counter of `COUNT`."""
    path = tmp_path / "counter"
    path.write_bytes(bytes(8))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
        yield lambda: int.from_bytes(shared[:8], "little")


COUNT = """
import mmap
file = open({path!r}, "r+b")
shared = mmap.mmap(file.fileno(), 8)
n = 0
while True:
    n += 1
    shared[:8] = n.to_bytes(8, "little")
"""


def test_memory_bomb_is_killed_and_counted(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("bomb", Limits(memory=64 * MIB))
    bomb = start("hoard = []\nwhile True: hoard.append(bytearray(1 << 20))")
    cgroup.attach(bomb.pid)
    assert cgroup.oom_kills() == 0
    go(bomb)
    assert bomb.wait(15) == -signal.SIGKILL
    stats = cgroup.stats()
    assert stats.oom_kills == 1
    assert stats.memory_peak is not None and 32 * MIB < stats.memory_peak <= 64 * MIB


def test_oom_kills_are_known_after_removal(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("bomb", Limits(memory=32 * MIB))
    bomb = start("hoard = []\nwhile True: hoard.append(bytearray(1 << 20))")
    cgroup.attach(bomb.pid)
    go(bomb)
    bomb.wait(15)
    cgroup.remove()
    cgroup.remove()
    assert cgroup.oom_kills() == 1


def test_oom_kills_of_an_earlier_run_are_not_counted(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("bomb", Limits(memory=32 * MIB))
    bomb = start("hoard = []\nwhile True: hoard.append(bytearray(1 << 20))")
    cgroup.attach(bomb.pid)
    go(bomb)
    bomb.wait(15)
    assert hierarchy.create("bomb", Limits()).oom_kills() == 0


def test_files_in_memory_count_as_memory(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("shm", Limits(memory=32 * MIB))
    writer = start("fd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(1 << 20))")
    cgroup.attach(writer.pid)
    go(writer)
    assert writer.wait(15) == -signal.SIGKILL
    assert (cgroup.oom_kills() or 0) >= 1


def test_fork_bomb_stops_at_limit_and_is_killed(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("bomb", Limits(pids=30))
    code = "while True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
    bomb = start(code)
    cgroup.attach(bomb.pid)
    go(bomb)
    eventually(lambda: cgroup.stats().pids == 30)
    assert len(cgroup.pids()) <= 30
    cgroup.kill()
    assert cgroup.pids() == []
    assert bomb.wait(5) == -signal.SIGKILL
    cgroup.remove()
    assert not any(map(os.path.exists, directories(cgroup)))


def test_cpu_quota_is_enforced(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("busy", Limits(cpu=0.2))
    loops = [start("while True: pass") for _ in range(2)]
    for loop in loops:
        cgroup.attach(loop.pid)
        go(loop)
    started, before = time.monotonic(), cgroup.stats().cpu_seconds or 0.0
    time.sleep(1)
    used = (cgroup.stats().cpu_seconds or 0.0) - before
    assert 0.02 < used / (time.monotonic() - started) < 0.4


def test_limits_can_be_raised_lowered_and_removed(hierarchy: Hierarchy) -> None:
    cgroup = hierarchy.create("other", Limits(memory=64 * MIB, cpu=0.5, pids=10))
    before = read_limits(cgroup)
    cgroup.set_limits(Limits(memory=128 * MIB, cpu=2, pids=20))
    cgroup.set_limits(NO_LIMITS)
    assert read_limits(cgroup) == read_limits(hierarchy.create("free", NO_LIMITS)) != before
    cgroup.set_limits(Limits(memory=64 * MIB, cpu=0.5, pids=10))
    assert read_limits(cgroup) == before


def read_limits(cgroup: Cgroup) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cpu.cfs_quota_us")
    paths = [f"{d}/{n}" for d in directories(cgroup) for n in (*names, "pids.max", "memory.max")]
    return {
        os.path.basename(path): Path(path).read_text() for path in paths if os.path.exists(path)
    }


def test_memory_limit_below_usage_is_refused_or_kills(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("full", Limits(memory=256 * MIB))
    holder = start("hoard = bytearray(100 << 20)\nprint(flush=True)\ntime.sleep(60)")
    cgroup.attach(holder.pid)
    go(holder)
    assert holder.stdout and holder.stdout.readline()
    assert (cgroup.stats().memory or 0) > 90 * MIB
    if hierarchy.enforcement == "cgroup-v1":
        with pytest.raises(LimitReached, match="33554432"):
            cgroup.set_limits(Limits(memory=32 * MIB))
    else:
        cgroup.set_limits(Limits(memory=32 * MIB))
        assert holder.wait(10) == -signal.SIGKILL


def test_children_of_attached_process_are_members(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("tree", Limits())
    parent = start("os.fork() or os.setsid() or os.fork()\ntime.sleep(60)")
    cgroup.attach(parent.pid)
    assert cgroup.pids() == [parent.pid]
    go(parent)
    eventually(lambda: len(cgroup.pids()) == 3)
    for directory in directories(cgroup):
        assert len(Path(directory, "cgroup.procs").read_text().split()) == 3
    cgroup.kill()


def test_children_forked_before_attach_are_moved_with_core(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    placement = renamed(detect().placement)
    if not placement.core or placement.enforcement != "cgroup-v1":
        pytest.skip("needs controllers of version 1 and a core of version 2")
    hierarchy = Hierarchy(placement)
    cgroup = hierarchy.create("early", Limits())
    parent = start("os.fork()\ntime.sleep(60)")
    Path(placement.core, "early", "cgroup.procs").write_text(str(parent.pid))
    go(parent)
    eventually(lambda: len(cgroup.pids()) == 2)
    cgroup.attach(parent.pid)
    for directory in directories(cgroup):
        assert sorted(Path(directory, "cgroup.procs").read_text().split()) == sorted(
            map(str, cgroup.pids())
        )
    cgroup.kill()
    cgroup.remove()
    remove_directories(hierarchy)


def test_exited_process_cannot_be_attached(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("late", Limits())
    gone = start("")
    gone.communicate(b"\n")
    with pytest.raises(SandboxGone, match=str(gone.pid)):
        cgroup.attach(gone.pid)


def test_process_can_be_cloned_into_cgroup(core: Hierarchy) -> None:
    cgroup = core.create("born", NO_LIMITS)
    cgroup_fd = cgroup.open()
    wait, release = os.pipe()
    cloned = linux.clone3(0, cgroup=cgroup_fd)
    if not cloned.pid:
        os.close(release)
        os.read(wait, 1)
        os._exit(7)
    assert cgroup_fd is not None
    for fd in (cgroup_fd, wait):
        os.close(fd)
    assert cgroup.pids() == [cloned.pid]
    assert cgroup.joined
    os.close(release)
    assert os.waitstatus_to_exitcode(os.waitpid(cloned.pid, 0)[1]) == 7
    os.close(cloned.pidfd)


def test_engine_moves_to_leaf_of_its_cgroup(
    core: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    scope = core.create("scope", NO_LIMITS)
    engine = start("time.sleep(60)")
    scope.attach(engine.pid)
    (path,) = directories(scope)
    CgroupPlacement(enforcement="cgroup-v2", core=f"{path}/smokebox", crowded=path).prepare()
    assert scope.pids() == []
    moved = Path(path, "smokebox-engine", "cgroup.procs").read_text().split()
    assert moved == [str(engine.pid)]
    scope.kill()
    assert engine.wait(5) == -signal.SIGKILL
    scope.remove()
    assert not os.path.exists(path)


@pytest.mark.parametrize("key", ["", "..", ".", "../x", "a/b", ".hidden"])
def test_key_cannot_escape_its_directory(key: str) -> None:
    with pytest.raises(InvalidOption, match="cgroup"):
        Cgroup(key, CgroupPlacement(enforcement="cgroup-v2", core="/nowhere"))


def check_freeze(cgroup: Cgroup, count: Callable[[], int]) -> None:
    eventually(lambda: count() > 0)
    cgroup.freeze()
    frozen_at = count()
    time.sleep(0.1)
    assert count() == frozen_at
    cgroup.freeze()
    cgroup.thaw()
    eventually(lambda: count() > frozen_at)


def test_freeze_stops_and_thaw_continues(
    hierarchy: Hierarchy,
    start: Callable[[str], subprocess.Popen[bytes]],
    counter: Callable[[], int],
    tmp_path: Path,
) -> None:
    cgroup = hierarchy.create("ice", Limits())
    process = start(COUNT.format(path=str(tmp_path / "counter")))
    cgroup.attach(process.pid)
    go(process)
    check_freeze(cgroup, counter)


def test_empty_cgroup_freezes_at_once(hierarchy: Hierarchy) -> None:
    cgroup = hierarchy.create("ice", Limits())
    cgroup.freeze()
    cgroup.thaw()


def test_frozen_process_can_be_killed(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("ice", Limits())
    process = start("time.sleep(60)")
    cgroup.attach(process.pid)
    cgroup.freeze()
    cgroup.kill()
    assert process.wait(5) == -signal.SIGKILL


def test_cgroup2_freezes_and_kills_without_controllers(
    core: Hierarchy,
    start: Callable[[str], subprocess.Popen[bytes]],
    counter: Callable[[], int],
    tmp_path: Path,
) -> None:
    cgroup = core.create("ice", NO_LIMITS)
    process = start(COUNT.format(path=str(tmp_path / "counter")))
    cgroup.attach(process.pid)
    go(process)
    check_freeze(cgroup, counter)
    assert (cgroup.stats().cpu_seconds or 0) > 0
    cgroup.kill()
    assert process.wait(5) == -signal.SIGKILL


def test_kill_and_remove_are_safe_to_repeat(hierarchy: Hierarchy) -> None:
    cgroup = hierarchy.create("twice", Limits())
    for _ in range(2):
        cgroup.kill()
        cgroup.remove()
    assert cgroup.pids() == []
    assert cgroup.stats().memory is None


def test_removed_cgroup_raises_sandbox_gone(hierarchy: Hierarchy) -> None:
    cgroup = hierarchy.create("gone", Limits())
    cgroup.remove()
    for call in (cgroup.freeze, cgroup.thaw, lambda: cgroup.set_limits(Limits())):
        with pytest.raises(SandboxGone, match="gone"):
            call()
    with pytest.raises(SandboxGone, match="gone"):
        cgroup.attach(os.getpid())


def test_remove_with_live_process_fails_and_names_it(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    cgroup = hierarchy.create("alive", Limits())
    process = start("time.sleep(60)")
    cgroup.attach(process.pid)
    with pytest.raises(DeadlineExceeded, match=str(process.pid)):
        cgroup.remove(timeout=0.05)
    with pytest.raises(Conflict, match="alive"):
        hierarchy.create("alive", Limits())


ENGINE = """
import json, subprocess, sys
from smokebox.engine.jail.cgroup_hierarchy import CgroupPlacement, Hierarchy
from smokebox.limits import Limits

cgroup = Hierarchy(CgroupPlacement(**json.loads(sys.argv[1]))).create("mine-1", Limits())
process = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
cgroup.attach(process.pid)
print(process.pid, flush=True)
process.wait()
"""


def test_cgroups_of_killed_engine_are_swept(hierarchy: Hierarchy) -> None:
    placement = json.dumps(dataclasses.asdict(hierarchy.placement))
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, placement], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
    live = hierarchy.create("mine-2", Limits())
    other = hierarchy.create("theirs", Limits())
    assert hierarchy.sweep(["mine-2"], prefix="mine-") == ["mine-1"]
    assert select.select([pidfd], [], [], 0)[0], "the process still runs"
    os.close(pidfd)
    assert all(map(os.path.exists, directories(live) + directories(other)))


def test_sweep_without_prefix_removes_only_empty_old_cgroups(
    hierarchy: Hierarchy, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    full = hierarchy.create("full", Limits())
    hierarchy.create("empty", Limits())
    process = start("time.sleep(60)")
    full.attach(process.pid)
    assert hierarchy.sweep([]) == []
    assert hierarchy.sweep([], idle=0) == ["empty"]
    assert process.poll() is None


FILES = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")


def plain_cgroup(tmp_path: Path, *files: str) -> Cgroup:
    directory = tmp_path / "smokebox" / "key"
    directory.mkdir(parents=True)
    for name in files:
        (directory / name).write_text("")
    parent = str(directory.parent)
    parents = dict.fromkeys(("memory", "pids", "cpu"), parent)
    return Cgroup("key", CgroupPlacement(enforcement="cgroup-v2", parents=parents, core=parent))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(memory=64 * MIB, cpu=0.5, pids=20), ["67108864", "0", "20", "50000 100000"]),
        (Limits(memory=MIB, cpu=0.01, pids=1), ["1048576", "0", "1", "1000 100000"]),
        (NO_LIMITS, ["max", "max", "max", "max 100000"]),
    ],
)
def test_version_2_limits_are_written(tmp_path: Path, limits: Limits, expected: list[str]) -> None:
    plain_cgroup(tmp_path, *FILES).set_limits(limits)
    assert [(tmp_path / "smokebox" / "key" / name).read_text() for name in FILES] == expected


def test_version_2_without_swap_writes_the_rest(tmp_path: Path) -> None:
    plain_cgroup(tmp_path, "memory.max", "pids.max", "cpu.max").set_limits(Limits(memory=MIB))
    assert (tmp_path / "smokebox" / "key" / "memory.max").read_text() == "1048576"


def test_version_2_stats_are_read(tmp_path: Path) -> None:
    cgroup = plain_cgroup(tmp_path)
    for name, text in {
        "memory.current": "5000\n",
        "memory.stat": "anon 4000\ninactive_file 1000\n",
        "memory.peak": "9000\n",
        "memory.max": "67108864\n",
        "memory.events": "low 0\noom 2\noom_kill 2\n",
        "pids.current": "3\n",
        "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
    }.items():
        (tmp_path / "smokebox" / "key" / name).write_text(text)
    stats = cgroup.stats()
    assert (stats.memory, stats.memory_peak, stats.pids) == (4000, 9000, 3)
    assert (stats.cpu_seconds, stats.oom_kills) == (2.5, 2)


def test_abandoned_tolerates_concurrent_removal(tmp_path: Path) -> None:
    cgroup = Cgroup("mine-1", CgroupPlacement(enforcement="cgroup-v2", core=str(tmp_path)))
    directory, stop = tmp_path / "mine-1", threading.Event()

    def create_and_remove() -> None:
        while not stop.is_set():
            directory.mkdir()
            directory.rmdir()

    other = threading.Thread(target=create_and_remove)
    other.start()
    try:
        for _ in range(100):
            cgroup.abandoned(60.0)
    finally:
        stop.set()
        other.join()
