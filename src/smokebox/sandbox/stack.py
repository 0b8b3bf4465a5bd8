"""Stack size of threads that run scripts.

The shell is a recursive interpreter: nesting in a script uses stack. Four known scripts overflow an
ordinary stack and crash the process; on a deep one they hit a limit.
"""

from __future__ import annotations

import functools
import os
import resource

import bashkit

# Address space, not memory: a page counts only after it is used.
STACK_SIZE = 1 << 30
MIN_STACK_SIZE = 64 << 20

_RUST = "RUST_MIN_STACK"


def stack_size() -> int:
    """Return 1 GiB, or half of the machine's memory if that is less, in bytes."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return MIN_STACK_SIZE
    half = memory // 2 // MIN_STACK_SIZE * MIN_STACK_SIZE
    return max(MIN_STACK_SIZE, min(STACK_SIZE, half))


@functools.cache
def deepen_engine_threads() -> None:
    """Give the threads that the engine starts itself the same stack size.

    Rust reads the size from the environment once, when its first thread starts. So one is started
    here, by a call to another library's filesystem. There may be more threads than processors,
    which share a limit of address space (`ulimit -v`).
    """
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    shared = stack_size() if space == resource.RLIM_INFINITY else space // 32
    before = os.environ.get(_RUST)
    os.environ[_RUST] = str(min(stack_size(), shared))
    try:
        bashkit.FileSystem.from_capsule(bashkit.FileSystem().to_capsule()).exists("/")
    finally:
        if before is None:
            del os.environ[_RUST]
        else:
            os.environ[_RUST] = before
