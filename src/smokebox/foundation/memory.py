"""Memory of this process that the C library keeps for later."""

from __future__ import annotations

import ctypes

# From malloc.h of glibc.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
_LARGE = 4 << 20
_ARENAS = 2


def return_large_blocks() -> None:
    """Return large blocks to the kernel as soon as they are freed.

    By default glibc keeps such blocks once one was freed, in as many heaps as there are threads: a
    server that held some long outputs at once would keep their memory. Other C libraries have no
    such function, and are left as they are.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_ARENA_MAX, _ARENAS)
