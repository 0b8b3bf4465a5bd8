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
