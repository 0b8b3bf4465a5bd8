"""Filesystems over another one: changes kept apart, or refused."""

from __future__ import annotations

import posixpath
import threading
from typing import TYPE_CHECKING, NoReturn

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
    """Filesystem that shows `lower` and keeps every change in `upper` (in memory by default).

    Removed files of the lower filesystem are only hidden. Hidden paths are kept in this object and
    not in `upper`, so another overlay over the same two starts with everything visible.
    """

    def __init__(self, lower: Filesystem, upper: Filesystem | None = None) -> None:
        self.lower = lower
        self.upper = MemoryFilesystem() if upper is None else upper
        # A hidden path hides everything below it in the lower filesystem, also after it is created
        # again.
        self._hidden: set[str] = set()
        self._lock = threading.RLock()

    def read(self, path: str) -> bytes:
        with self._lock:
            return self._layer_of(path).read(path)

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
            self._copy_up_parents(path)
            self.upper.write(path, data)
            if mode is not None:
                self.upper.chmod(path, mode)

    def append(self, path: str, data: bytes) -> None:
        with self._lock:
            self._check_file(path)
            if self.upper.peek(path) is None and self.peek(path) is not None:
                self.write(path, self.lower.read(path) + data)
                return
            self._copy_up_parents(path)
            self.upper.append(path, data)

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._check_absent(path)
            self._copy_up_parents(path)
            self.upper.mkdir(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        with self._lock:
            if path == "/":
                raise AccessDenied(path, "the root of a filesystem cannot be moved or removed.")
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
            self._copy_up_parents(path)
            self.upper.symlink(target, path)

    def readlink(self, path: str) -> str:
        with self._lock:
            return self._layer_of(path).readlink(path)

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
                raise AccessDenied(source, "the root of a filesystem cannot be moved or removed.")
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

    def _layer_of(self, path: str) -> Filesystem:
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
        """Raise unless `path` is a file or missing; return the mode of a lower file."""
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

    def _copy_up_parents(self, path: str) -> None:
        """Create the parents of `path` in the upper filesystem, as they are in the lower one."""
        above = posixpath.dirname(path)
        entry = self.peek(above)
        if entry is None:
            raise PathNotFound(path)
        if entry.kind != "directory":
            raise PathNotDirectory(path)
        self._copy_up(above)

    def _copy_up(self, path: str) -> None:
        """Copy `path` itself to the upper filesystem, without the contents of a directory."""
        if self.upper.peek(path) is not None:
            return
        entry = self.lstat(path)
        self._copy_up_parents(path)
        if entry.kind == "directory":
            self.upper.mkdir(path)
        elif entry.kind == "symlink":
            self.upper.symlink(self.lower.readlink(path), path)
            return
        else:
            self.upper.write(path, self.lower.read(path))
        self.upper.chmod(path, entry.mode)


class ReadOnlyFilesystem(Filesystem):
    """Filesystem that shows `inner` and refuses every change."""

    def __init__(self, inner: Filesystem) -> None:
        self.inner = inner

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def lstat(self, path: str) -> Entry:
        return self.inner.lstat(path)

    def peek(self, path: str) -> Entry | None:
        return self.inner.peek(path)

    def listdir(self, path: str) -> Mapping[str, Entry]:
        return self.inner.listdir(path)

    def readlink(self, path: str) -> str:
        return self.inner.readlink(path)

    def write(self, path: str, data: bytes) -> None:
        _refuse(path)

    def append(self, path: str, data: bytes) -> None:
        _refuse(path)

    def mkdir(self, path: str) -> None:
        _refuse(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        _refuse(path)

    def rename(self, source: str, target: str) -> None:
        _refuse(source)

    def copy(self, source: str, target: str) -> None:
        _refuse(target)

    def symlink(self, target: str, path: str) -> None:
        _refuse(path)

    def chmod(self, path: str, mode: int) -> None:
        _refuse(path)

    def touch(self, path: str, mtime: float) -> None:
        _refuse(path)

    def refresh(self) -> None:
        self.inner.refresh()

    def close(self) -> None:
        self.inner.close()


def _refuse(path: str) -> NoReturn:
    raise AccessDenied(
        path,
        f"{path} is in a filesystem that is mounted read-only.",
        hint="Write somewhere else, or mount it without ReadOnlyFilesystem.",
        read_only=True,
    )
