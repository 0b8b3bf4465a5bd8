"""Scheduling of the calling thread by the kernel, for threads that have to respond soon."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# The number of sched_setattr by machine; other machines keep their defaults.
_NUMBERS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
_SCHED_OTHER, _RESET_ON_FORK = 0, 1
# sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, and utilisation.
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")


def prefer_latency(slice_seconds: float, *, nice: int = 0) -> bool:
    """Run the calling thread soon after it wakes, for shorter slices of time.

    Threads and processes that it starts have the default. The kernel knows slices since Linux
    6.12, and ignores them before.

    Args:
        slice_seconds: Length of a slice.
        nice: Added to its priority, where the user may do so: its share of the CPU.

    Returns:
        False if the kernel refuses, as for a thread with another scheduling policy.
    """
    number = _NUMBERS.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    current = os.getpriority(os.PRIO_PROCESS, 0)
    system = ctypes.CDLL(None, use_errno=True)
    for priority in (max(-20, current + nice), current):
        attributes = _ATTRIBUTES.pack(
            _ATTRIBUTES.size,
            _SCHED_OTHER,
            _RESET_ON_FORK,
            priority,
            0,
            int(slice_seconds * 1e9),
            0,
            0,
            0,
            0,
        )
        if int(system.syscall(number, 0, attributes, 0)) == 0:
            return True
        if ctypes.get_errno() not in (errno.EPERM, errno.EACCES):
            break
    return False


def prefer_session(nice: int) -> bool:
    """Change the share of the CPU of the session that this process leads, against other sessions.

    The kernel divides the CPU among sessions where no cgroup does (`sched_autogroup_enabled`), and
    then the priority of a process counts inside its session only. Only root may raise a share.

    Returns:
        False if the session is that of another process, or the kernel refuses.
    """
    if os.getsid(0) != os.getpid():
        return False
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(nice))
    except OSError:
        return False
    return True
