"""The seam for files that live anywhere: what can be mounted in a virtual sandbox.

Paths are absolute and normal, seen from the filesystem's own root. No method follows a
symlink in the last name: `Tree` does that, across mounts. All raise `smokebox.errors`.
Calls come from several threads at once.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    FileTooLarge,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    StorageFull,
    SymlinkLoop,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a filesystem: what it is, and what is known of it."""

    kind: Literal["file", "directory", "symlink"]
    size: int = 0
    mtime: float = 0.0
    mode: int = 0o644


class Filesystem(ABC):
    """Files behind six methods; the rest has answers that follow from them."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole of a file."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file whose parent exists."""

    @abstractmethod
    def lstat(self, path: str) -> Entry:
        """What is at `path` itself."""

    @abstractmethod
    def listdir(self, path: str) -> Mapping[str, Entry]:
        """What is in a directory, by name."""

    @abstractmethod
    def mkdir(self, path: str) -> None:
        """Make one directory whose parent exists."""

    @abstractmethod
    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a symlink, an empty directory, or with `recursive` a whole one."""

    def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, making it where there is none."""
        try:
            before = self.read(path)
        except PathNotFound:
            before = b""
        self.write(path, before + data)

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory, replacing a file that is there."""
        if self.lstat(source).kind == "directory":
            self.mkdir(target)
            for name in self.listdir(source):
                self.rename(f"{source}/{name}", f"{target}/{name}")
        else:
            self.write(target, self.read(source))
        self.remove(source)

    def symlink(self, target: str, path: str) -> None:
        """Make a symlink at `path` that leads to `target`."""
        raise Unsupported(
            f"{type(self).__name__} holds no symlinks, so {path} was not made.",
            hint="Copy the file instead.",
            operation="symlink",
        )

    def readlink(self, path: str) -> str:
        """Where the symlink at `path` leads."""
        self.lstat(path)
        raise PathError(path, f"not a symlink: {path}")

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits, where there are any."""
        self.lstat(path)

    def close(self) -> None:
        """Let go of connections and handles. Safe to repeat."""


_BY_NUMBER: dict[int, type[PathError]] = {
    errno.ENOENT: PathNotFound,
    errno.EEXIST: PathExists,
    errno.EISDIR: PathIsDirectory,
    errno.ENOTDIR: PathNotDirectory,
    errno.ENOTEMPTY: DirectoryNotEmpty,
    errno.ELOOP: SymlinkLoop,
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.EFBIG: FileTooLarge,
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
}


def from_os_error(error: OSError, path: str) -> PathError:
    """The class of ours that says what the operating system said of `path`."""
    kind = _BY_NUMBER.get(error.errno or 0)
    if kind is None:
        return PathError(path, f"{error.strerror or error}: {path}")
    if kind is StorageFull:
        return StorageFull(path, hint="Free some space and try again.")
    return kind(path)
