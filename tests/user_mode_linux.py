"""A guest kernel with project quotas, for hosts whose own kernel has none: user-mode Linux.

It runs as a process, sees the files of the host as its root, and runs tests of this directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("linux.uml", "mkfs.xfs", "mkfs.ext4", "busybox")
MARK = "SMOKEBOX_GUEST"

_MODULES = ("quota_tree", "quota_v2", "loop", "overlay")
_TESTS = Path(__file__).parent
# Of all tests together. A guest that emulates a kernel is slow, and the host may be busy.
SECONDS = 500.0
# Root of the guest is that of the host: all that is written goes to file systems in its memory.
# The checkout may lie in /tmp, which one of them hides.
_INIT = """#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp {mark}=1
export PYTHONDONTWRITEBYTECODE=1 PY_COLORS=0
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
mkdir /run/checkout
mount --bind {directory} /run/checkout
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p {directory}
mount --move /run/checkout {directory}
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
for module in {modules}; do
    busybox insmod $(find /usr/lib/uml/modules/$(uname -r) -name $module.ko)
done
busybox ip link set lo up
cd {directory}
{python} -m pytest -v -p no:cacheprovider --tb=short --timeout=60 {tests} > /dev/tty0 2>&1
echo "tests ended with $?" > /dev/tty0
busybox poweroff -f
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRun:
    """Output of the tests in the guest, and whether all passed and none was skipped."""

    passed: bool
    output: str


def missing() -> str:
    """Return why this host cannot run the guest, or nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "root of the guest needs root's files of the host"


# Of tests that run others in the guest.
MARKS = [
    pytest.mark.skipif(MARK in os.environ, reason="this is the guest"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "none"),
    pytest.mark.timeout(SECONDS + 20),
]


def run_tests(directory: Path, *tests: str) -> GuestRun:
    """Run test files, named from the directory of tests, in a guest of their own."""
    init = directory / "init"
    init.write_text(
        _INIT.format(
            mark=MARK,
            modules=" ".join(_MODULES),
            directory=_TESTS.parent,
            python=sys.executable,
            tests=" ".join(f"tests/{test}" for test in tests),
        )
    )
    init.chmod(0o755)
    root = ["rootfstype=hostfs", "rootflags=/", "rw", f"init={init}"]
    console = ["con0=fd:0,fd:1", "con=null", "ssl=null", "quiet"]
    done = subprocess.run(
        ["linux.uml", "mem=1024M", f"uml_dir={directory}", *root, *console],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
        check=False,
        # The guest's memory is a file here.
        env={**os.environ, "TMPDIR": str(directory)},
    )
    output = done.stdout.decode(errors="replace").replace("\r\n", "\n")
    passed = "tests ended with 0" in output and " skipped" not in output
    return GuestRun(passed=passed, output=output)
