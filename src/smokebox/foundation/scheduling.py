"""Scheduling of the calling thread by the kernel, for threads that have to respond soon."""

from __future__ import annotations

import ctypes
import os
import struct

# The number of sched_setattr by machine; other machines keep their defaults.
_NUMBERS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
_SCHED_OTHER, _RESET_ON_FORK = 0, 1
# sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, and utilisation.
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")


def prefer_latency(slice_seconds: float) -> bool:
    """Run the calling thread soon after it wakes, for shorter slices of time.

    Threads and processes that it starts have the default. The kernel knows slices since Linux
    6.12, and ignores them before.

    Returns:
        False if the kernel refuses, as for a thread with another scheduling policy.
    """
    number = _NUMBERS.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size,
        _SCHED_OTHER,
        _RESET_ON_FORK,
        os.getpriority(os.PRIO_PROCESS, 0),
        0,
        int(slice_seconds * 1e9),
        0,
        0,
        0,
        0,
    )
    system = ctypes.CDLL(None, use_errno=True)
    return int(system.syscall(number, 0, attributes, 0)) == 0
