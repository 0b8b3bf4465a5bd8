"""What is below a directory of a sandbox: listed, matched and measured."""

from __future__ import annotations

import os
import posixpath
import stat as stat_bits
from typing import TYPE_CHECKING

from smokebox.engine.files.opening import LIST, closing, naming
from smokebox.engine.files.rooted import file_info
from smokebox.engine.files.trees import walk
from smokebox.errors import LimitReached
from smokebox.sandbox.globbing import glob_paths
from smokebox.sandbox.hostfiles import shown
from smokebox.types import DiskUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.files.rooted import Rooted
    from smokebox.sandbox.globbing import Found
    from smokebox.types import FileInfo

MAX_ENTRIES = 200_000
MAX_SEEN = 2_000_000


def list_files(
    files: Rooted, path: str, *, recursive: bool = False, hidden: bool = False
) -> list[FileInfo]:
    """What is in a directory, sorted by path, symlinks as themselves.

    Without `hidden`, names with a leading dot and what is below them are left out.
    """
    found: list[FileInfo] = []
    with naming(path), closing(files.open(path, LIST)) as top:
        for seen in walk(top, recursive=recursive, lenient=True):
            if not hidden and "/." in f"/{seen.path}":
                continue
            if len(found) == MAX_ENTRIES:
                raise _too_many(path, MAX_ENTRIES)
            where = posixpath.join(path, shown(seen.path))
            found.append(file_info(where, seen.stat, stat_bits.S_ISLNK(seen.stat.st_mode)))
    return sorted(found, key=lambda info: info.path)


def glob(files: Rooted, pattern: str, cwd: str, *, hidden: bool, files_only: bool) -> list[str]:
    """Absolute paths that match, sorted. See `SandboxApi.glob`."""
    seen = 0

    def listing(path: str) -> Iterator[Found]:
        nonlocal seen
        for found in files.listing(path):
            seen += 1
            if seen > MAX_SEEN:
                raise _too_many(pattern, MAX_SEEN)
            yield found

    return glob_paths(pattern, cwd, listing, hidden=hidden, files_only=files_only)


def disk_usage(files: Rooted, path: str) -> DiskUsage:
    """What a file, or a directory with all that is below it, takes of the disk."""
    total = _Total()
    with naming(path), closing(files.open(path, os.O_PATH)) as fd:
        found = os.fstat(fd)
        total.add(found)
        if stat_bits.S_ISDIR(found.st_mode):
            for seen in walk(fd, lenient=True):
                total.add(seen.stat)
    return DiskUsage(bytes=total.bytes, files=total.files, directories=total.directories)


class _Total:
    def __init__(self) -> None:
        self.bytes = self.files = self.directories = 0
        self._linked: set[tuple[int, int]] = set()

    def add(self, found: os.stat_result) -> None:
        is_directory = stat_bits.S_ISDIR(found.st_mode)
        if found.st_nlink > 1 and not is_directory:
            if (found.st_dev, found.st_ino) in self._linked:
                return
            self._linked.add((found.st_dev, found.st_ino))
        self.bytes += found.st_blocks * 512
        self.directories += is_directory
        self.files += not is_directory


def _too_many(what: str, limit: int) -> LimitReached:
    return LimitReached(
        f"{what}: more than {limit} files are not listed at once.",
        hint="List a directory further down, or use a command such as find.",
        limit=limit,
    )
