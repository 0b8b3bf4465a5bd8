"""Changes in one filesystem over another that is never written to."""

from __future__ import annotations

import posixpath
import threading
from typing import TYPE_CHECKING

from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SymlinkLoop,
)
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem
from smokebox.sandbox.filesystems.memory import MemoryFilesystem

if TYPE_CHECKING:
    from collections.abc import Mapping


class OverlayFilesystem(Filesystem):
    """What `lower` holds, with every change kept in `upper` (by default in memory).

    A removed file of the lower filesystem is only hidden. What is hidden is remembered here
    and not in `upper`, so another overlay over the same two starts with everything visible.
    """

    def __init__(self, lower: Filesystem, upper: Filesystem | None = None) -> None:
        self.lower = lower
        self.upper = MemoryFilesystem() if upper is None else upper
        # A hidden path hides all below it in the lower filesystem, whatever is above it later.
        self._hidden: set[str] = set()
        self._lock = threading.RLock()

    def read(self, path: str) -> bytes:
        with self._lock:
            return self._holder(path).read(path)

    def lstat(self, path: str) -> Entry:
        entry = self.peek(path)
        if entry is None:
            raise PathNotFound(path)
        return entry

    def peek(self, path: str) -> Entry | None:
        with self._lock:
            entry = self.upper.peek(path)
            if entry is None and not self._is_hidden(path):
                entry = self.lower.peek(path)
            return entry

    def listdir(self, path: str) -> Mapping[str, Entry]:
        with self._lock:
            if self.lstat(path).kind != "directory":
                raise PathNotDirectory(path)
            listed: dict[str, Entry] = {}
            if self._has_lower_directory(path):
                prefix = path.rstrip("/") + "/"
                below = self.lower.listdir(path)
                listed = {n: e for n, e in below.items() if prefix + n not in self._hidden}
            if self.upper.peek(path) is not None:
                listed.update(self.upper.listdir(path))
            return listed

    def write(self, path: str, data: bytes) -> None:
        with self._lock:
            mode = self._check_file(path)
            self._make_room(path)
            self.upper.write(path, data)
            if mode is not None:
                self.upper.chmod(path, mode)

    def append(self, path: str, data: bytes) -> None:
        with self._lock:
            self._check_file(path)
            if self.upper.peek(path) is None and self.peek(path) is not None:
                self.write(path, self.lower.read(path) + data)
                return
            self._make_room(path)
            self.upper.append(path, data)

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._check_absent(path)
            self._make_room(path)
            self.upper.mkdir(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        with self._lock:
            if path == "/":
                raise AccessDenied(path, "the root of a filesystem stays where it is.")
            entry = self.lstat(path)
            if entry.kind == "directory" and not recursive and self.listdir(path):
                raise DirectoryNotEmpty(path)
            if self.upper.peek(path) is not None:
                self.upper.remove(path, recursive=True)
            if not self._is_hidden(path) and self.lower.peek(path) is not None:
                self._hidden.add(path)

    def symlink(self, target: str, path: str) -> None:
        with self._lock:
            self._check_absent(path)
            self._make_room(path)
            self.upper.symlink(target, path)

    def readlink(self, path: str) -> str:
        with self._lock:
            return self._holder(path).readlink(path)

    def chmod(self, path: str, mode: int) -> None:
        with self._lock:
            if self.lstat(path).kind == "symlink":
                raise SymlinkLoop(path)
            self._copy_up(path)
            self.upper.chmod(path, mode)

    def touch(self, path: str, mtime: float) -> None:
        with self._lock:
            self._copy_up(path)
            self.upper.touch(path, mtime)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            if source == "/":
                raise AccessDenied(source, "the root of a filesystem stays where it is.")
            super().rename(source, target)

    def copy(self, source: str, target: str) -> None:
        with self._lock:
            super().copy(source, target)

    def refresh(self) -> None:
        self.upper.refresh()
        self.lower.refresh()

    def close(self) -> None:
        self.upper.close()
        self.lower.close()

    def _holder(self, path: str) -> Filesystem:
        self.lstat(path)
        return self.lower if self.upper.peek(path) is None else self.upper

    def _is_hidden(self, path: str) -> bool:
        if not self._hidden:
            return False
        while path != "/":
            if path in self._hidden:
                return True
            path = posixpath.dirname(path)
        return False

    def _has_lower_directory(self, path: str) -> bool:
        if self._is_hidden(path):
            return False
        entry = self.lower.peek(path)
        return entry is not None and entry.kind == "directory"

    def _check_file(self, path: str) -> int | None:
        """Refuse what is no file; its permissions, where only the lower filesystem has it."""
        entry = self.peek(path)
        if entry is None:
            return None
        if entry.kind == "directory":
            raise PathIsDirectory(path)
        if entry.kind == "symlink":
            raise SymlinkLoop(path)
        return entry.mode if self.upper.peek(path) is None else None

    def _check_absent(self, path: str) -> None:
        if self.peek(path) is not None:
            raise PathExists(path)

    def _make_room(self, path: str) -> None:
        """Make the directories above `path` in the upper filesystem, as they are below."""
        above = posixpath.dirname(path)
        entry = self.peek(above)
        if entry is None:
            raise PathNotFound(path)
        if entry.kind != "directory":
            raise PathNotDirectory(path)
        self._copy_up(above)

    def _copy_up(self, path: str) -> None:
        """Make the upper filesystem hold `path` itself, though not what is in a directory."""
        if self.upper.peek(path) is not None:
            return
        entry = self.lstat(path)
        self._make_room(path)
        if entry.kind == "directory":
            self.upper.mkdir(path)
        elif entry.kind == "symlink":
            self.upper.symlink(self.lower.readlink(path), path)
            return
        else:
            self.upper.write(path, self.lower.read(path))
        self.upper.chmod(path, entry.mode)
