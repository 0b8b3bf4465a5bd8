"""How much this process has grown since a script began.

The engine keeps the output of a loop until the loop ends, whatever becomes of it, and no
limit of its own counts that: `while :; do cat file; done > /dev/null` takes gigabytes.
"""

from __future__ import annotations

import os

_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Growth:
    """Counts from when it is made. Other work in the process counts too."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start = resident_bytes()

    @property
    def is_too_much(self) -> bool:
        """Whether the process has grown by more than the limit."""
        return resident_bytes() - self._start > self._limit


def resident_bytes() -> int:
    """The memory that this process holds, or 0 where the system does not tell."""
    try:
        with open(_STATM, "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
