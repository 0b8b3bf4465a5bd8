"""How deep a stack scripts need, and how to give it to the threads of the engine.

The shell is a recursive interpreter: nesting in a script becomes depth on the stack. On an
ordinary stack four known scripts end the whole process; on a deep one they meet a limit.
"""

from __future__ import annotations

import functools
import os
import resource

import bashkit

# Address space, not memory: a page counts once something has been there.
STACK_SIZE = 1 << 30
MIN_STACK_SIZE = 64 << 20

_RUST = "RUST_MIN_STACK"


def stack_size() -> int:
    """A gigabyte, or half of what the machine has, in bytes."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return MIN_STACK_SIZE
    half = memory // 2 // MIN_STACK_SIZE * MIN_STACK_SIZE
    return max(MIN_STACK_SIZE, min(STACK_SIZE, half))


@functools.cache
def deepen_engine_threads() -> None:
    """Make the threads that the engine starts by itself as deep as ours.

    Rust looks for the size in the environment when its first thread starts, and never
    again: so one starts here, for a question to a filesystem of another library. There may
    be as many as processors and more, so a limit of address space (`ulimit -v`) is shared.
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
