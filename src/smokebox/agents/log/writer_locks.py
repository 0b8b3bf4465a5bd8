"""Which sessions of a file have a writer that is alive, in whatever process or container.

The kernel knows: a writer holds a lock on one byte of a file beside the sessions, and loses
it when its process ends, however it ends. Nothing has to be renewed, and nothing waited for.
"""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """What must be told that this process is a copy."""

    def after_fork(self) -> None:
        """Forget everything that belongs to the original."""
        ...


class WriterLocks:
    """Locks by the number of a session. One object of them is one owner."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held: set[int] = set()

    def take(self, number: int) -> bool:
        """Become the owner of a session; False while another is, also one of this process."""
        if number in self._held:
            return False
        try:
            self._lock(number, fcntl.F_WRLCK)
        except OSError as error:
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            return False
        self._held.add(number)
        return True

    def give(self, number: int) -> None:
        """Be it no longer. Safe to repeat."""
        if number in self._held:
            self._held.discard(number)
            self._lock(number, fcntl.F_UNLCK)

    def close(self) -> None:
        """Give all of them back."""
        self._held.clear()
        os.close(self._file)

    def _lock(self, number: int, kind: int) -> None:
        # struct flock: type, whence, start, length, pid (0, as locks of open files want it).
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)


_told: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def notify_after_fork(one: ForkAware) -> None:
    """Have it told in each copy of this process, which else would hold the locks too."""
    _told.add(one)


def _after_fork() -> None:
    for one in list(_told):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)
