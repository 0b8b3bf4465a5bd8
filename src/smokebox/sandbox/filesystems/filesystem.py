"""The seam for files that live anywhere: what can be mounted in a virtual sandbox.

Paths are absolute and normal, seen from the filesystem's own root. No method follows a
symlink, neither in the last name nor before it: `Tree` does that, across mounts. All
raise `smokebox.errors`, and what raises has changed nothing. Calls come from several
threads at once.
"""

from __future__ import annotations

import errno
import posixpath
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    FileTooLarge,
    InvalidOption,
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
    """One thing in a filesystem: what it is, and what is known of it.

    `other` is what has a name but no content to read: a pipe, a socket, a device.
    """

    kind: Literal["file", "directory", "symlink", "other"]
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

    def peek(self, path: str) -> Entry | None:
        """What is at `path` itself, or None. Shells ask for what is not there all the time."""
        try:
            return self.lstat(path)
        except PathNotFound:
            return None

    def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, making it where there is none."""
        try:
            before = self.read(path)
        except PathNotFound:
            before = b""
        self.write(path, before + data)

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory, replacing a file or an empty directory that is there.

        This one copies, then removes: a filesystem that can do it at once should.
        """
        entry = self.lstat(source)
        if source == target:
            return
        existing = self.peek(target)
        check_move(source, target, entry, existing)
        if existing is not None and {entry.kind, existing.kind} != {"file"}:
            self.remove(target)
        self._copy(source, target, entry)
        self.remove(source, recursive=True)

    def copy(self, source: str, target: str) -> None:
        """Copy a file, or a directory with all that is in it, with permissions.

        Into a directory that is there it is merged, unless a name in both stands in the way.
        """
        entry = self.lstat(source)
        if entry.kind == "symlink":
            raise SymlinkLoop(source)
        check_move(source, target, entry, self.peek(target))
        self._copy(source, target, entry)

    def _copy(self, source: str, target: str, entry: Entry) -> None:
        plan = self._plan(source, target, entry)
        fresh = self.peek(target) is None
        if not fresh:
            self._check_merge(plan)
        try:
            for old, new, entry in plan:
                self._copy_one(old, new, entry)
        except BaseException:
            if fresh:
                with suppress(PathError):
                    self.remove(target, recursive=True)
            raise

    def _plan(self, source: str, target: str, entry: Entry) -> list[tuple[str, str, Entry]]:
        """What to copy where, directories before what is in them."""
        plan = [(source, target, entry)]
        for old, new, found in plan:
            if found.kind == "directory":
                for name, child in sorted(self.listdir(old).items()):
                    plan.append((f"{old}/{name}", f"{new}/{name}", child))
        return plan

    def _check_merge(self, plan: list[tuple[str, str, Entry]]) -> None:
        for old, new, entry in plan:
            existing = self.peek(new)
            check_move(old, new, entry, existing)
            if existing is not None and "symlink" in (entry.kind, existing.kind):
                raise PathExists(new)

    def _copy_one(self, source: str, target: str, entry: Entry) -> None:
        if entry.kind == "symlink":
            self.symlink(self.readlink(source), target)
            return
        if entry.kind == "directory":
            if self.peek(target) is None:
                self.mkdir(target)
        else:
            self.write(target, self.read(source))
        self.chmod(target, entry.mode)

    def makedirs(self, path: str) -> None:
        """Make a directory and those above it; one that is there is as good."""
        missing: list[str] = []
        while (entry := self.peek(path)) is None:
            missing.append(path)
            path = posixpath.dirname(path)
        if entry.kind != "directory":
            raise (PathNotDirectory if missing else PathExists)(path)
        for directory in reversed(missing):
            self.mkdir(directory)

    def touch(self, path: str, mtime: float) -> None:
        """Set the time of the last change, where there is one to set."""
        self.lstat(path)

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

    def refresh(self) -> None:
        """Forget what may have changed elsewhere; a sandbox calls this before each command."""

    def close(self) -> None:
        """Let go of connections and handles. Safe to repeat."""


def check_move(source: str, target: str, entry: Entry, existing: Entry | None) -> None:
    """Refuse what `rename` cannot do, with the errors of rename(2)."""
    if target.startswith(source.rstrip("/") + "/"):
        raise PathError(target, f"cannot move a directory into itself: {target}")
    if existing is None:
        return
    if entry.kind == "directory" and existing.kind != "directory":
        raise PathNotDirectory(target)
    if entry.kind != "directory" and existing.kind == "directory":
        raise PathIsDirectory(target)


def check_limit(option: str, limit: int | None) -> None:
    """Refuse what is not a number of bytes or of files, or None."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise InvalidOption(
            f"{option} is a number of at least 0 or None, not {limit!r}.",
            hint=f"Pass for example {option}=10_000_000.",
            option=option,
            value=limit,
        )


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
