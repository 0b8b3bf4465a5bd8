"""What the kernel knows of a mounted bucket: a number for each path that it has looked up."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING

from smokebox.engine.disk import room
from smokebox.engine.mounts.fuse_protocol import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


class Inode:
    """One file or directory that the kernel has a number for.

    `draft` is what was written and may not be in the bucket yet, `handles` counts who has it
    open, and `lookups` how often the kernel was told of it. One that is `gone` was removed or
    replaced. `mode` and `mtime` were set here: a bucket has no place for them. `told` is the
    size that the kernel has been given, `cached` the version that it read.
    """

    __slots__ = (
        "cached",
        "draft",
        "gone",
        "handles",
        "lock",
        "lookups",
        "mode",
        "mtime",
        "number",
        "path",
        "told",
    )

    def __init__(self, number: int, path: str) -> None:
        self.number = number
        self.path = path
        self.lookups = 0
        self.handles = 0
        self.draft: Draft | None = None
        self.gone = False
        self.mode: int | None = None
        self.mtime: float | None = None
        self.told: int | None = None
        self.cached = ""
        # Held while its draft comes to be, is written to or is uploaded.
        self.lock = threading.RLock()


class Inodes:
    """All of them, by number and by path. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        root = Inode(ROOT, "/")
        root.lookups = 1
        self._by_number = {ROOT: root}
        self._by_path = {"/": root}
        self._drafted: set[Inode] = set()
        self._last = ROOT

    def __getitem__(self, number: int) -> Inode:
        return self._by_number[number]

    def at(self, path: str) -> Inode | None:
        """The one that is at a path, if the kernel knows it."""
        return self._by_path.get(path)

    def looked_up(self, path: str) -> Inode:
        """The one at a path, of which the kernel is told once more."""
        with self._lock:
            inode = self._by_path.get(path)
            if inode is None:
                self._last += 1
                inode = Inode(self._last, path)
                self._by_number[inode.number] = self._by_path[path] = inode
            inode.lookups += 1
            return inode

    def forget(self, number: int, lookups: int) -> None:
        """The kernel has forgotten so many times that it was told."""
        with self._lock:
            inode = self._by_number.get(number)
            if inode is None or number == ROOT:
                return
            inode.lookups -= lookups
            self._drop_if_unknown(inode)

    def released(self, inode: Inode) -> None:
        """Nobody has it open any more."""
        with self._lock:
            self._drop_if_unknown(inode)

    def remove(self, path: str) -> None:
        """What was at a path is gone, though the kernel may still hold it."""
        with self._lock:
            self._remove(path)

    def move(self, source: str, target: str) -> None:
        """What was at a path, and all below it, is at another now."""
        with self._lock:
            self._remove(target)
            for inode in list(self._below(source)):
                del self._by_path[inode.path]
                inode.path = target + inode.path[len(source) :]
                inode.told = None
                self._by_path[inode.path] = inode

    def begin(self, inode: Inode, draft: Draft) -> None:
        """Give one a draft."""
        with self._lock:
            inode.draft = draft
            self._drafted.add(inode)

    def end(self, inode: Inode) -> None:
        """Let go of the draft of one, if it has any."""
        with self._lock:
            draft, inode.draft = inode.draft, None
            self._drafted.discard(inode)
        if draft is not None:
            draft.close()

    def drafts(self, directory: str) -> list[Inode]:
        """Those anywhere below a directory that have a draft."""
        inside = directory.rstrip("/") + "/"
        with self._lock:
            found = [one for one in self._drafted if not one.gone]
        return [inode for inode in found if inode.path.startswith(inside)]

    def _below(self, path: str) -> Iterator[Inode]:
        inside = path.rstrip("/") + "/"
        for known, inode in self._by_path.items():
            if known == path or known.startswith(inside):
                yield inode

    def _remove(self, path: str) -> None:
        inode = self._by_path.pop(path, None)
        if inode is not None:
            inode.gone = True

    def _drop_if_unknown(self, inode: Inode) -> None:
        if inode.lookups <= 0 and not inode.handles:
            self._by_number.pop(inode.number, None)
            if self._by_path.get(inode.path) is inode:
                del self._by_path[inode.path]


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
