"""Interface of filesystems that can be mounted in a virtual sandbox.

Paths are absolute and normalized, relative to the filesystem's own root. No method follows a
symlink in any path component: `Tree` does that, across mounts. Methods raise `smokebox.errors`, and
a method that raises has changed nothing. Calls come from several threads at once.
"""

from __future__ import annotations

import posixpath
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.errors import (
    InvalidOption,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SymlinkLoop,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Entry:
    """Metadata of one file, directory or symlink.

    `other` is anything without readable content: a pipe, a socket, a device.
    """

    kind: Literal["file", "directory", "symlink", "other"]
    size: int = 0
    mtime: float = 0.0
    mode: int = 0o644


class Filesystem(ABC):
    """Base class with six abstract methods; the others have default implementations."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the contents of a file."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file whose parent exists."""

    @abstractmethod
    def lstat(self, path: str) -> Entry:
        """Return the entry at `path`, without following symlinks."""

    @abstractmethod
    def listdir(self, path: str) -> Mapping[str, Entry]:
        """Return the entries of a directory by name."""

    @abstractmethod
    def mkdir(self, path: str) -> None:
        """Create one directory whose parent exists."""

    @abstractmethod
    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a symlink or an empty directory; with `recursive` any directory."""

    def peek(self, path: str) -> Entry | None:
        """Return the entry at `path`, or None. Shells look up missing paths all the time."""
        try:
            return self.lstat(path)
        except PathNotFound:
            return None

    def append(self, path: str, data: bytes) -> None:
        """Append to a file, creating it if it is missing."""
        try:
            before = self.read(path)
        except PathNotFound:
            before = b""
        self.write(path, before + data)

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory, replacing a file or an empty directory at the target.

        The default copies, then removes; override it where an atomic rename is possible.
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
        """Copy a file or a directory tree with permissions.

        Merges into an existing directory, unless a name in both conflicts.
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
        """Return what to copy where, directories before their contents."""
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
        """Create a directory and its parents; an existing directory is accepted."""
        missing: list[str] = []
        while (entry := self.peek(path)) is None:
            missing.append(path)
            path = posixpath.dirname(path)
        if entry.kind != "directory":
            raise (PathNotDirectory if missing else PathExists)(path)
        for directory in reversed(missing):
            self.mkdir(directory)

    def touch(self, path: str, mtime: float) -> None:
        """Set the modification time, if the filesystem has one."""
        self.lstat(path)

    def symlink(self, target: str, path: str) -> None:
        """Create a symlink at `path` with the given target."""
        raise Unsupported(
            f"{type(self).__name__} has no symlinks, so {path} was not created.",
            hint="Copy the file instead.",
            operation="symlink",
        )

    def readlink(self, path: str) -> str:
        """Return the target of the symlink at `path`."""
        self.lstat(path)
        raise PathError(path, f"not a symlink: {path}")

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits, if the filesystem has them."""
        self.lstat(path)

    def refresh(self) -> None:
        """Drop caches of what others may have changed; a sandbox calls this before each command."""

    def close(self) -> None:
        """Release connections and handles. Safe to repeat."""


def check_move(source: str, target: str, entry: Entry, existing: Entry | None) -> None:
    """Raise for moves that rename(2) refuses, with its errors."""
    if target.startswith(source.rstrip("/") + "/"):
        raise PathError(target, f"cannot move a directory into itself: {target}")
    if existing is None:
        return
    if entry.kind == "directory" and existing.kind != "directory":
        raise PathNotDirectory(target)
    if entry.kind != "directory" and existing.kind == "directory":
        raise PathIsDirectory(target)


def check_limit(option: str, limit: int | None) -> None:
    """Raise `InvalidOption` unless `limit` is a non-negative number or None."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise InvalidOption(
            f"{option} must be a non-negative number or None, not {limit!r}.",
            hint=f"Pass {option}=10_000_000, for example.",
            option=option,
            value=limit,
        )
