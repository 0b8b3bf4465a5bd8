"""What was written to a file of a bucket and is not an object yet: a nameless file on disk."""

from __future__ import annotations

import errno
import os
import threading
import time

from smokebox.engine.disk import room

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class Spool:
    """The directory where drafts are, and how much all of them may take, None for no limit."""

    def __init__(self, directory: int, limit: int | None) -> None:
        self._directory = directory
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()

    def open(self) -> int:
        """A file without a name, which ends with the last who has it open."""
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        return os.open(".", flags, 0o600, dir_fd=self._directory)

    def grow(self, before: int, after: int) -> None:
        """A draft is to have another size; raises ENOSPC where there is no room for it."""
        with self._lock:
            growth = after - before
            if growth > 0:
                above = self._limit is not None and self._used + growth > self._limit
                # A hole takes nothing now, and all of it when it is sent.
                if above or growth > room(self._directory):
                    raise OSError(errno.ENOSPC, "no room for what is written to the bucket")
            self._used += growth


class Draft:
    """The content of one file, here. Used under the lock of its inode."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.fd = spool.open()
        self.size = 0
        self.mtime = time.time()
        self.dirty = True

    def fill(self, pieces: Iterator[bytes]) -> None:
        """Begin with what the object holds."""
        for piece in pieces:
            self.write(self.size, piece)
        self.dirty = False

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from an offset on, fewer at the end."""
        return os.pread(self.fd, size, offset)

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Put bytes at an offset."""
        end = offset + len(data)
        if end > self.size:
            self._spool.grow(self.size, end)
            self.size = end
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], offset + written)
        self.touch()
        return written

    def truncate(self, size: int) -> None:
        """Cut it, or fill it up with zeros."""
        self._spool.grow(self.size, size)
        os.ftruncate(self.fd, size)
        self.size = size
        self.touch()

    def touch(self) -> None:
        """It is not what the bucket has."""
        self.dirty = True
        self.mtime = time.time()

    def close(self) -> None:
        """Let go of it and of its room."""
        self._spool.grow(self.size, 0)
        self.size = 0
        os.close(self.fd)
