"""Limits where there are no cgroups, and what an ordinary user has of them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import smokebox
from smokebox.engine.jail.cgroup import ProcessTree, rlimits_for
from smokebox.engine.jail.cgroup_hierarchy import CgroupPlacement, Hierarchy, detect
from smokebox.engine.jail.kernfs import state
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
NO_LIMITS = Limits(memory=None, cpu=None, pids=None, disk=None, open_files=None)
NOBODY = "61234"
SOURCE = Path(smokebox.__file__).parent.parent


@pytest.fixture
def uncontained() -> ProcessTree:
    found = Hierarchy(CgroupPlacement(enforcement="rlimits")).create("bare", Limits())
    assert isinstance(found, ProcessTree)
    return found


@pytest.fixture
def tree() -> Iterator[int]:
    """Two busy processes with 50 MiB, one in a session of its own; the pid of the other."""
    code = """
import os
hoard = bytearray(50 << 20)
os.fork() or os.setsid()
print(flush=True)
while True: pass
"""
    with subprocess.Popen([sys.executable, "-Sc", code], stdout=subprocess.PIPE) as process:
        assert process.stdout
        for _ in range(2):
            process.stdout.readline()
        yield process.pid
        process.kill()


def test_without_cgroups_a_tree_is_counted(uncontained: ProcessTree, tree: int) -> None:
    uncontained.attach(tree)
    stats = uncontained.stats()
    assert stats.pids == 2
    assert stats.memory is not None and 50 * MIB < stats.memory < 100 * MIB
    assert stats.cpu_seconds is not None
    assert (stats.oom_kills, stats.memory_peak) == (None, None)
    uncontained.kill()


def test_without_cgroups_a_tree_is_frozen_and_thawed(uncontained: ProcessTree, tree: int) -> None:
    uncontained.attach(tree)
    uncontained.freeze()
    assert [state(pid) for pid in uncontained.pids()] == ["T", "T"]
    spent = uncontained.stats().cpu_seconds
    time.sleep(0.05)
    assert uncontained.stats().cpu_seconds == spent
    uncontained.thaw()
    assert "T" not in [state(pid) for pid in uncontained.pids()]
    uncontained.kill()


def test_without_cgroups_a_tree_is_killed_whole(uncontained: ProcessTree, tree: int) -> None:
    uncontained.attach(tree)
    uncontained.freeze()
    uncontained.kill()
    uncontained.kill()
    assert uncontained.pids() == []
    uncontained.remove()


def test_what_another_engine_started_is_found_by_its_first_process(tree: int) -> None:
    found = Hierarchy(CgroupPlacement(enforcement="rlimits")).adopt("bare", tree)
    assert len(found.pids()) == 2
    found.kill()


def test_the_processes_can_be_listed_by_somebody_who_knows_better(tree: int) -> None:
    found = ProcessTree("bare", CgroupPlacement(enforcement="rlimits"), lambda: [tree])
    assert found.pids() == [tree]
    Hierarchy(found.placement).adopt("bare", tree).kill()


def test_without_cgroups_nothing_is_open_and_nothing_is_swept(uncontained: ProcessTree) -> None:
    assert uncontained.open() is None
    assert uncontained.last_death() is None
    assert Hierarchy(uncontained.placement).sweep([], prefix="") == []


def test_every_process_is_held_to_files_and_cores_and_without_cgroups_to_the_rest() -> None:
    limits = Limits(memory=64 * MIB, pids=7, open_files=50, disk=MIB)
    always = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 50, resource.RLIMIT_FSIZE: MIB}
    assert rlimits_for(limits, "cgroup-v2") == always
    more = {resource.RLIMIT_NPROC: 7, resource.RLIMIT_DATA: 64 * MIB}
    assert rlimits_for(limits, "rlimits") == always | more
    assert rlimits_for(NO_LIMITS, "rlimits") == {resource.RLIMIT_CORE: 0}


def test_no_rlimit_is_above_our_own() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = rlimits_for(Limits(open_files=1 << 20), "rlimits")
    assert held[resource.RLIMIT_NOFILE] == min(hard, 1 << 20)


LIMITED = """
import json, os, resource, sys, time
for kind, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(int(kind), (value, value))
"""


def everyones_python() -> str:
    """A Python that an ordinary user may run, and that can read this package."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if python is None or subprocess.run([*who, "test", "-r", SOURCE], check=False).returncode:
        pytest.skip("no python3 and no source that an ordinary user may read")
    return python


def as_nobody(limits: Limits, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code as an ordinary user, held to the rlimits of a host without cgroups."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("becoming an ordinary user takes root and setpriv")
    who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    argv = [
        *who,
        everyones_python(),
        "-Sc",
        LIMITED + code,
        json.dumps(rlimits_for(limits, "rlimits")),
    ]
    return subprocess.run(argv, cwd=cwd, timeout=15, capture_output=True, text=True, check=False)


def test_an_ordinary_user_s_fork_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    code = """
made = []
try:
    while True:
        pid = os.fork()
        if not pid:
            time.sleep(60)
        made.append(pid)
except BlockingIOError:
    print(len(made))
for pid in made:
    os.kill(pid, 9)
    os.wait()
"""
    assert as_nobody(Limits(pids=9), code, tmp_path).stdout == "8\n"


def test_an_ordinary_user_s_memory_ends_at_the_limit(tmp_path: Path) -> None:
    code = "bytearray(32 << 20); print('some'); bytearray(512 << 20)"
    done = as_nobody(Limits(memory=128 * MIB), code, tmp_path)
    assert done.stdout == "some\n"
    assert "MemoryError" in done.stderr


def test_reserving_addresses_is_not_using_memory(tmp_path: Path) -> None:
    code = "import mmap; mmap.mmap(-1, 8 << 30, prot=mmap.PROT_READ); print('fine')"
    assert as_nobody(Limits(memory=128 * MIB), code, tmp_path).stdout == "fine\n"


def test_an_ordinary_user_s_file_ends_at_the_limit(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if not os.stat(parent).st_mode & 0o001:
            parent.chmod(0o711)
    code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "os.truncate(os.open('big', os.O_CREAT | os.O_WRONLY), 2 << 20)"
    done = as_nobody(Limits(disk=MIB), code, tmp_path)
    assert "File too large" in done.stderr
    assert (tmp_path / "big").stat().st_size == 0


def test_an_ordinary_user_opens_no_more_files_than_allowed(tmp_path: Path) -> None:
    code = "hoard = []\nwhile True: hoard.append(os.open('/', os.O_RDONLY)); print(len(hoard))"
    done = as_nobody(Limits(open_files=20), code, tmp_path)
    assert "Too many open files" in done.stderr
    assert done.stdout.split()[-1] == "17"


OURS = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.limits import Limits
"""


def test_an_ordinary_user_is_told_what_is_missing(tmp_path: Path) -> None:
    done = as_nobody(NO_LIMITS, OURS + "print(detect().describe())", tmp_path)
    assert "rlimits" in done.stdout, done.stderr
    assert "Delegate=yes" in done.stdout


@pytest.fixture
def delegated() -> Iterator[str]:
    """The name of a cgroup of version 1 in each hierarchy that belongs to an ordinary user."""
    if os.geteuid() != 0 or detect().enforcement != "cgroup-v1":
        pytest.skip("takes root, and cgroups of version 1")
    name = f"smokebox-test-{os.getpid()}-delegated"
    made = [f"/sys/fs/cgroup/{kind}/{name}" for kind in FIRST]
    for path in made:
        os.mkdir(path)
        for each in ("", "cgroup.procs"):
            os.chown(f"{path}/{each}", int(NOBODY), int(NOBODY))
    yield name
    for path in made:
        for each in (f"{path}/smokebox", path):
            with suppress(FileNotFoundError):
                os.rmdir(each)


FIRST = ("memory", "pids", "cpu", "cpuacct", "freezer")


def test_an_ordinary_user_has_the_cgroups_that_were_delegated(
    delegated: str, tmp_path: Path
) -> None:
    moves = "".join(
        f"open('/sys/fs/cgroup/{kind}/{delegated}/cgroup.procs', 'w').write('0')\n"
        for kind in FIRST
    )
    code = f"""{OURS}
import subprocess
cgroup = detect().create("bomb", Limits(memory=32 << 20, pids=5))
bomb = subprocess.Popen(["tail", "/dev/zero"])
cgroup.attach(bomb.pid)
bomb.wait()
print(detect().enforcement, bomb.returncode, cgroup.last_death())
cgroup.kill()
cgroup.remove()
"""
    become = f"import os; {moves}os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    done = subprocess.run(
        [everyones_python(), "-Sc", become + code],
        cwd=tmp_path.root,
        timeout=15,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "cgroup-v1 -9 out of memory (limit 32 MiB)\n", done.stderr
