"""State that the kernel refers to by number: inodes of a mounted bucket, with unsaved drafts."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.disk import available_bytes
from smokebox.engine.mounts.fuse_protocol import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True, eq=False)
class Inode:
    """One file or directory that the kernel has a number for.

    `draft` is content that may not be in the bucket yet. `handles` counts open files, and
    `lookups` the references of the kernel. `gone` means removed or replaced. `mode` and `mtime`
    were set by programs: a bucket cannot store them. `known_size` is the size that the kernel
    last got, and `cached` the version that it has in its page cache. `lock` is held while the
    draft is created, written or uploaded.
    """

    number: int
    path: str
    lookups: int = 0
    handles: int = 0
    draft: Draft | None = None
    gone: bool = False
    mode: int | None = None
    mtime: float | None = None
    known_size: int | None = None
    cached: str = ""
    lock: threading.RLock = field(default_factory=threading.RLock)


class Inodes:
    """The inodes of a mount, by number and by path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        root = Inode(ROOT, "/", lookups=1)
        self._by_number = {ROOT: root}
        self._by_path = {"/": root}
        self._drafted: set[Inode] = set()
        self._last = ROOT

    def __getitem__(self, number: int) -> Inode:
        return self._by_number[number]

    def at(self, path: str) -> Inode | None:
        """Return the inode at a path, if the kernel knows it."""
        return self._by_path.get(path)

    def look_up(self, path: str) -> Inode:
        """Return the inode at a path, and count a reference of the kernel."""
        with self._lock:
            inode = self._by_path.get(path)
            if inode is None:
                self._last += 1
                inode = Inode(self._last, path)
                self._by_number[inode.number] = self._by_path[path] = inode
            inode.lookups += 1
            return inode

    def forget(self, number: int, lookups: int) -> None:
        """Subtract references of the kernel."""
        with self._lock:
            inode = self._by_number.get(number)
            if inode is None or number == ROOT:
                return
            inode.lookups -= lookups
            self._drop_if_unused(inode)

    def released(self, inode: Inode) -> None:
        """Drop an inode without open files, unless the kernel refers to it."""
        with self._lock:
            self._drop_if_unused(inode)

    def remove(self, path: str) -> None:
        """Mark the inode at a path as gone; the kernel may still refer to it."""
        with self._lock:
            self._remove(path)

    def move(self, source: str, target: str) -> None:
        """Change the paths of an inode and of those below it."""
        with self._lock:
            self._remove(target)
            for inode in list(self._below(source)):
                del self._by_path[inode.path]
                inode.path = target + inode.path[len(source) :]
                inode.known_size = None
                self._by_path[inode.path] = inode

    def add_draft(self, inode: Inode, draft: Draft) -> None:
        """Give an inode a draft."""
        with self._lock:
            inode.draft = draft
            self._drafted.add(inode)

    def discard_draft(self, inode: Inode) -> None:
        """Close the draft of an inode, if it has one."""
        with self._lock:
            draft, inode.draft = inode.draft, None
            self._drafted.discard(inode)
        if draft is not None:
            draft.close()

    def drafts(self, directory: str) -> list[Inode]:
        """Return the inodes at any depth below a directory that have a draft."""
        prefix = directory.rstrip("/") + "/"
        with self._lock:
            return [
                inode for inode in self._drafted if not inode.gone and inode.path.startswith(prefix)
            ]

    def _below(self, path: str) -> Iterator[Inode]:
        prefix = path.rstrip("/") + "/"
        for known, inode in self._by_path.items():
            if known == path or known.startswith(prefix):
                yield inode

    def _remove(self, path: str) -> None:
        inode = self._by_path.pop(path, None)
        if inode is not None:
            inode.gone = True

    def _drop_if_unused(self, inode: Inode) -> None:
        if inode.lookups <= 0 and not inode.handles:
            self._by_number.pop(inode.number, None)
            if self._by_path.get(inode.path) is inode:
                del self._by_path[inode.path]


class Spool:
    """The directory of drafts. `limit` bounds their total size, None for no limit."""

    def __init__(self, directory: int, limit: int | None) -> None:
        self._directory = directory
        self._limit = limit
        self._used = 0
        self._lock = threading.Lock()

    def open(self) -> int:
        """Open an unnamed file."""
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        return os.open(".", flags, 0o600, dir_fd=self._directory)

    def resize(self, before: int, after: int) -> None:
        """Account for a draft's new size; raises ENOSPC if there is no room for it."""
        with self._lock:
            growth = after - before
            if growth > 0:
                above = self._limit is not None and self._used + growth > self._limit
                # A hole occupies nothing here, but its whole size when it is uploaded.
                if above or growth > available_bytes(self._directory):
                    raise OSError(errno.ENOSPC, "no room for writes to the bucket")
            self._used += growth


class Draft:
    """Local content of one file, used under the lock of its inode."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.fd = spool.open()
        self.size = 0
        self.mtime = time.time()
        self.dirty = True

    def fill(self, chunks: Iterator[bytes]) -> None:
        """Start with the content of the object."""
        for chunk in chunks:
            self.write(self.size, chunk)
        self.dirty = False

    def read(self, offset: int, size: int) -> bytes:
        """Read from an offset, less at the end."""
        return os.pread(self.fd, size, offset)

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Write all of `data` at an offset."""
        end = offset + len(data)
        if end > self.size:
            self._spool.resize(self.size, end)
            self.size = end
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], offset + written)
        self._mark_dirty()
        return written

    def truncate(self, size: int) -> None:
        """Shorten it, or extend it with zeros."""
        self._spool.resize(self.size, size)
        os.ftruncate(self.fd, size)
        self.size = size
        self._mark_dirty()

    def close(self) -> None:
        """Close the file and free its space."""
        self._spool.resize(self.size, 0)
        self.size = 0
        os.close(self.fd)

    def _mark_dirty(self) -> None:
        self.dirty = True
        self.mtime = time.time()
