"""Limits without cgroups, and limits of an unprivileged user."""

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
def process_tree() -> ProcessTree:
    tree = Hierarchy(CgroupPlacement(enforcement="rlimits")).create("tree", Limits())
    assert isinstance(tree, ProcessTree)
    return tree


@pytest.fixture
def root_pid() -> Iterator[int]:
    """Start two busy processes with 50 MiB, the child in another session; the parent's pid."""
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


def test_process_tree_is_counted(process_tree: ProcessTree, root_pid: int) -> None:
    process_tree.attach(root_pid)
    stats = process_tree.stats()
    assert stats.pids == 2
    assert stats.memory is not None and 50 * MIB < stats.memory < 100 * MIB
    assert stats.cpu_seconds is not None
    assert (stats.oom_kills, stats.memory_peak) == (None, None)
    process_tree.kill()


def test_process_tree_is_frozen_and_thawed(process_tree: ProcessTree, root_pid: int) -> None:
    process_tree.attach(root_pid)
    process_tree.freeze()
    assert [state(pid) for pid in process_tree.pids()] == ["T", "T"]
    used = process_tree.stats().cpu_seconds
    time.sleep(0.05)
    assert process_tree.stats().cpu_seconds == used
    process_tree.thaw()
    assert "T" not in [state(pid) for pid in process_tree.pids()]
    process_tree.kill()


def test_process_tree_is_killed(process_tree: ProcessTree, root_pid: int) -> None:
    process_tree.attach(root_pid)
    process_tree.freeze()
    process_tree.kill()
    process_tree.kill()
    assert process_tree.pids() == []
    process_tree.remove()


def test_process_tree_is_adopted_by_its_first_process(root_pid: int) -> None:
    found = Hierarchy(CgroupPlacement(enforcement="rlimits")).adopt("tree", root_pid)
    assert len(found.pids()) == 2
    found.kill()


def test_process_tree_has_nothing_to_open_or_sweep(process_tree: ProcessTree) -> None:
    assert process_tree.open() is None
    assert process_tree.oom_kills() is None
    assert Hierarchy(process_tree.placement).sweep([], prefix="") == []


def test_rlimits_cover_memory_and_pids_only_without_cgroups() -> None:
    limits = Limits(memory=64 * MIB, pids=7, open_files=50, disk=MIB)
    always = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 50, resource.RLIMIT_FSIZE: MIB}
    assert rlimits_for(limits, "cgroup-v2") == always
    more = {resource.RLIMIT_NPROC: 7, resource.RLIMIT_DATA: 64 * MIB}
    assert rlimits_for(limits, "rlimits") == always | more
    assert rlimits_for(NO_LIMITS, "rlimits") == {resource.RLIMIT_CORE: 0}


def test_rlimits_do_not_exceed_our_hard_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rlimits = rlimits_for(Limits(open_files=1 << 20), "rlimits")
    assert rlimits[resource.RLIMIT_NOFILE] == min(hard, 1 << 20)


LIMITED = """
import json, os, resource, sys, time
for kind, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(int(kind), (value, value))
"""


def system_python() -> str:
    """Return a Python that an unprivileged user can run and that can read this package."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if python is None or subprocess.run([*who, "test", "-r", SOURCE], check=False).returncode:
        pytest.skip("no python3 or no source that an unprivileged user can read")
    return python


def as_nobody(limits: Limits, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code as an unprivileged user, with the rlimits of a host without cgroups."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    argv = [
        *who,
        system_python(),
        "-Sc",
        LIMITED + code,
        json.dumps(rlimits_for(limits, "rlimits")),
    ]
    return subprocess.run(argv, cwd=cwd, timeout=15, capture_output=True, text=True, check=False)


def test_fork_bomb_of_unprivileged_user_stops_at_limit(tmp_path: Path) -> None:
    code = """
children = []
try:
    while True:
        pid = os.fork()
        if not pid:
            time.sleep(60)
        children.append(pid)
except BlockingIOError:
    print(len(children))
for pid in children:
    os.kill(pid, 9)
    os.wait()
"""
    assert as_nobody(Limits(pids=9), code, tmp_path).stdout == "8\n"


def test_memory_of_unprivileged_user_ends_at_limit(tmp_path: Path) -> None:
    code = "bytearray(32 << 20); print('some'); bytearray(512 << 20)"
    done = as_nobody(Limits(memory=128 * MIB), code, tmp_path)
    assert done.stdout == "some\n"
    assert "MemoryError" in done.stderr


def test_reserved_address_space_is_not_limited(tmp_path: Path) -> None:
    code = "import mmap; mmap.mmap(-1, 8 << 30, prot=mmap.PROT_READ); print('fine')"
    assert as_nobody(Limits(memory=128 * MIB), code, tmp_path).stdout == "fine\n"


def test_file_of_unprivileged_user_ends_at_limit(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if not os.stat(parent).st_mode & 0o001:
            parent.chmod(0o711)
    code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "os.truncate(os.open('big', os.O_CREAT | os.O_WRONLY), 2 << 20)"
    done = as_nobody(Limits(disk=MIB), code, tmp_path)
    assert "File too large" in done.stderr
    assert (tmp_path / "big").stat().st_size == 0


def test_open_files_of_unprivileged_user_are_limited(tmp_path: Path) -> None:
    code = "hoard = []\nwhile True: hoard.append(os.open('/', os.O_RDONLY)); print(len(hoard))"
    done = as_nobody(Limits(open_files=20), code, tmp_path)
    assert "Too many open files" in done.stderr
    assert done.stdout.split()[-1] == "17"


IMPORTS = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.limits import Limits
"""


def test_description_for_unprivileged_user_says_what_is_missing(tmp_path: Path) -> None:
    done = as_nobody(NO_LIMITS, IMPORTS + "print(detect().describe())", tmp_path)
    assert "rlimits" in done.stdout, done.stderr
    assert "Delegate=yes" in done.stdout


@pytest.fixture
def delegated() -> Iterator[str]:
    """Create a cgroup of version 1 per controller that belongs to NOBODY; its name."""
    if os.geteuid() != 0 or detect().enforcement != "cgroup-v1":
        pytest.skip("needs root and cgroups of version 1")
    name = f"smokebox-test-{os.getpid()}-delegated"
    paths = [f"/sys/fs/cgroup/{kind}/{name}" for kind in CONTROLLERS]
    for path in paths:
        os.mkdir(path)
        for each in ("", "cgroup.procs"):
            os.chown(f"{path}/{each}", int(NOBODY), int(NOBODY))
    yield name
    for path in paths:
        for each in (f"{path}/smokebox", path):
            with suppress(FileNotFoundError):
                os.rmdir(each)


CONTROLLERS = ("memory", "pids", "cpu", "cpuacct", "freezer")


def test_unprivileged_user_uses_delegated_cgroups(delegated: str, tmp_path: Path) -> None:
    moves = "".join(
        f"open('/sys/fs/cgroup/{kind}/{delegated}/cgroup.procs', 'w').write('0')\n"
        for kind in CONTROLLERS
    )
    code = f"""{IMPORTS}
import subprocess
cgroup = detect().create("bomb", Limits(memory=32 << 20, pids=5))
bomb = subprocess.Popen(["tail", "/dev/zero"])
cgroup.attach(bomb.pid)
bomb.wait()
print(detect().enforcement, bomb.returncode, cgroup.oom_kills())
cgroup.kill()
cgroup.remove()
"""
    become = f"import os; {moves}os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    done = subprocess.run(
        [system_python(), "-Sc", become + code],
        cwd=tmp_path.root,
        timeout=15,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "cgroup-v1 -9 1\n", done.stderr
