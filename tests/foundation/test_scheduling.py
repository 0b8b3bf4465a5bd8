"""Slices of the CPU, as the kernel tells them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Prints the slice of the process, and that of its child.
PROGRAM = """
import ctypes, os, struct, sys
from smokebox.foundation.scheduling import prefer_latency

def slice():
    attributes = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(315, 0, attributes, 56, 0) == 0
    return struct.unpack_from("=IIQiIQ", attributes)[5]

before = os.nice(3)
assert prefer_latency(0.0002)
assert os.nice(0) == before
print(slice(), flush=True)
if os.fork():
    os.wait()
else:
    print(slice(), flush=True)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the test reads by number")
def test_slice_of_a_thread_is_not_that_of_its_children() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    own, child = map(int, done.stdout.split())
    release = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
    if release >= (6, 12):
        assert own == 200_000
    assert child != 200_000


# Prints the priority of the thread that asks, of another, and of a child.
PRIORITIES = """
import os, subprocess, threading, ctypes
from smokebox.foundation.scheduling import prefer_latency

# The tests may run with another one.
os.setpriority(os.PRIO_PROCESS, 0, 0)
assert prefer_latency(0.001, nice=-5)
print(os.getpriority(os.PRIO_PROCESS, 0))
thread = threading.Thread(target=lambda: print(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
print(subprocess.run(["nice"], capture_output=True, text=True).stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
def test_priority_of_a_thread_is_not_that_of_others() -> None:
    assert run(PRIORITIES) == [-5, 0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives up its rights here")
def test_slice_is_set_where_the_priority_may_not_be_raised() -> None:
    program = PRIORITIES.replace("\nassert", "\nos.setuid(65534)\nassert")
    assert run(program) == [0, 0, 0]


SESSION = """
import os
from smokebox.foundation.scheduling import prefer_session

print(int(prefer_session(-5)))
os.setsid()
print(int(prefer_session(-5)))
print(open("/proc/self/autogroup").read().split()[-1])
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/proc/self/autogroup"),
    reason="only root may raise a share, of a kernel that has sessions of its own",
)
def test_share_of_a_session_is_raised_by_its_leader_only() -> None:
    assert run(SESSION) == [0, 1, -5]


def run(program: str) -> list[int]:
    """Run a program that prints numbers, in the session of the tests."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]
