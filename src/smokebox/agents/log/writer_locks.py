"""Locks of the writers of sessions in a file, held across processes and containers.

A writer locks one byte of a file. The kernel releases the lock when the process ends, so no
lease has to be renewed or waited for.
"""

from __future__ import annotations

import fcntl
import os
import struct


class WriterLocks:
    """Locks by number. Each object is one owner, also within one process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held: set[int] = set()

    def acquire(self, number: int) -> bool:
        """Lock a number; False if another owner, or this one, holds it."""
        if number in self._held:
            return False
        try:
            self._lock(number, fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError):
            return False
        self._held.add(number)
        return True

    def release(self, number: int) -> None:
        """Unlock a number. Safe to repeat."""
        if number in self._held:
            self._held.discard(number)
            self._lock(number, fcntl.F_UNLCK)

    def close(self) -> None:
        """Release all locks."""
        self._held.clear()
        os.close(self._file)

    def _lock(self, number: int, kind: int) -> None:
        # struct flock: type, whence, start, length, pid. The pid of an OFD lock must be 0.
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
