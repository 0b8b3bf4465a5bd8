"""Memory that the C library returns to the kernel."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Prints the megabytes that stay after long outputs came and went, with something small after each.
PROGRAM = """
import os
from smokebox.foundation.memory import return_large_blocks

def megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

if {call}:
    return_large_blocks()
before, small = megabytes(), []
del [bytes(8 << 20) for _ in range(2)][:]
for _ in range(3):
    large = []
    for _ in range(16):
        large.append(b"x" * (8 << 20))
        small.append(bytearray(2000))
    del large
print(megabytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library keeps none")
def test_large_blocks_are_returned_when_they_are_freed() -> None:
    kept, returned = [
        int(subprocess.check_output([sys.executable, "-c", PROGRAM.format(call=call)]))
        for call in (False, True)
    ]
    assert returned < 16 < kept
