"""Adapter of the shell's own in-memory filesystem, the fast path of `virtual()`."""

from __future__ import annotations

import posixpath
import re
import time
from typing import TYPE_CHECKING, Any

import bashkit

from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    FileTooLarge,
    InvalidPath,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SmokeboxError,
    StorageFull,
    SymlinkLoop,
)
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem, check_move

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_FILE_SIZE = 10_000_000
MAX_TOTAL_SIZE = 100_000_000
MAX_FILES = 10_000

# Seconds that a timestamp may differ from the clock and still count as now.
_NOW = 2.0

_FILE_MODE = 0o644


class NativeFilesystem(Filesystem):
    """Adapter of `bashkit.FileSystem`; `native` is the object to mount.

    It holds 10,000 files of up to 10 MB, 100 MB in total, and no name with a control character. It
    follows no symlinks; a `Tree` over it does.
    """

    def __init__(self, native: bashkit.FileSystem | None = None) -> None:
        self.native = bashkit.FileSystem() if native is None else native

    def read(self, path: str) -> bytes:
        try:
            return self.native.read_file(path)
        except (RuntimeError, UnicodeEncodeError) as error:
            self._refuse_symlink(path)
            raise _translate(error, path) from None

    def write(self, path: str, data: bytes) -> None:
        self._check_parent(path)
        before = self._refuse_symlink(path)
        try:
            self.native.write_file(path, data)
            # The shell drops the permissions of a file that it replaces.
            if before is not None and before.mode != _FILE_MODE:
                self.native.chmod(path, before.mode)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise _translate(error, path) from None

    def append(self, path: str, data: bytes) -> None:
        self._check_parent(path)
        self._refuse_symlink(path)
        try:
            self.native.append_file(path, data)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise _translate(error, path) from None

    def lstat(self, path: str) -> Entry:
        try:
            return _entry(self.native.stat(path))
        except (RuntimeError, UnicodeEncodeError) as error:
            raise self._translate_missing(error, path) from None

    def listdir(self, path: str) -> Mapping[str, Entry]:
        if self.lstat(path).kind != "directory":
            raise PathNotDirectory(path)
        try:
            return {item["name"]: _entry(item["metadata"]) for item in self.native.read_dir(path)}
        except RuntimeError as error:
            raise _translate(error, path) from None

    def mkdir(self, path: str) -> None:
        self._check_absent(path)
        try:
            self.native.mkdir(path)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise _translate(error, path) from None

    def remove(self, path: str, *, recursive: bool = False) -> None:
        _check_not_root(path)
        self.lstat(path)
        try:
            self.native.remove(path, recursive)
        except RuntimeError as error:
            raise _translate(error, path) from None

    def rename(self, source: str, target: str) -> None:
        _check_not_root(source)
        entry = self.lstat(source)
        if source == target:
            return
        check_move(source, target, entry, self.peek(target))
        _check_not_root(target)
        self._check_parent(target)
        try:
            self.native.rename(source, target)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise _translate(error, target) from None

    def symlink(self, target: str, path: str) -> None:
        self._check_absent(path)
        try:
            self.native.symlink(target, path)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise _translate(error, path) from None

    def readlink(self, path: str) -> str:
        if self.lstat(path).kind != "symlink":
            raise PathError(path, f"not a symlink: {path}")
        return self.native.read_link(path)

    def chmod(self, path: str, mode: int) -> None:
        if self.lstat(path).kind == "symlink":
            raise SymlinkLoop(path)
        self.native.chmod(path, mode & 0o7777)

    def touch(self, path: str, mtime: float) -> None:
        """Set the modification time to now; bashkit cannot set another."""
        if self.lstat(path).kind == "file" and abs(mtime - time.time()) < _NOW:
            self.write(path, self.read(path))

    def _check_parent(self, path: str) -> None:
        """Refuse paths below a symlink or a file, where bashkit would create unreachable files."""
        if path == "/":
            raise PathIsDirectory(path)
        try:
            parent = self.lstat(posixpath.dirname(path))
        except PathError as error:
            raise type(error)(path) from None
        if parent.kind != "directory":
            raise PathNotDirectory(path)

    def _check_absent(self, path: str) -> None:
        """Refuse an existing path: bashkit would replace it with the symlink."""
        if self.peek(path) is not None:
            raise PathExists(path)
        self._check_parent(path)

    def _refuse_symlink(self, path: str) -> Entry | None:
        entry = self.peek(path)
        if entry is not None and entry.kind == "symlink":
            raise SymlinkLoop(path)
        return entry

    def _translate_missing(self, error: Exception, path: str) -> SmokeboxError:
        """Translate errors; below a file or symlink, bashkit's "not found" is "not a directory"."""
        found = _translate(error, path)
        if isinstance(found, PathNotFound) and path.count("/") > 1:
            above = self.peek(posixpath.dirname(path))
            if above is not None and above.kind != "directory":
                return PathNotDirectory(path)
        return found


def _entry(metadata: dict[str, Any]) -> Entry:
    kind = metadata["file_type"]
    if kind not in ("file", "directory", "symlink"):
        kind = "other"
    return Entry(kind, metadata["size"], metadata["modified"], metadata["mode"])


def _check_not_root(path: str) -> None:
    # bashkit can remove its own root, and is unusable afterwards.
    if path == "/":
        raise AccessDenied(path, "the root of a filesystem cannot be moved or removed.")


def _translate(error: Exception, path: str) -> SmokeboxError:
    """Translate bashkit's errors, which are only text."""
    if isinstance(error, UnicodeEncodeError):
        return _bad_name(path, "it is not valid UTF-8")
    text = str(error).removeprefix("io error: ")
    for pattern, kind in _BY_TEXT:
        if re.match(pattern, text):
            return kind(path)
    if re.match(r"unsafe character|.* too long|path too deep", text):
        return _bad_name(path, text.split(" in path component")[0])
    return PathError(path, f"{text}: {path}")


def _bad_name(path: str, reason: str) -> InvalidPath:
    return InvalidPath(
        f"the memory filesystem cannot hold {path!r}: {reason}.",
        hint="Use a shorter name without control characters.",
        path=ascii(path),
    )


def _too_large(path: str) -> FileTooLarge:
    return FileTooLarge(
        path,
        f"{path} would exceed the limit of {MAX_FILE_SIZE} bytes per file.",
        hint="Write less, or raise VirtualLimits.file_size.",
    )


def _full(path: str) -> StorageFull:
    return StorageFull(
        path,
        f"no room for {path}: the limit is {MAX_TOTAL_SIZE} bytes in {MAX_FILES} files.",
        hint="Remove files, or raise VirtualLimits.storage and VirtualLimits.files.",
    )


_BY_TEXT: list[tuple[str, Callable[[str], SmokeboxError]]] = [
    (r"(parent directory |file )?not found", PathNotFound),
    (r"is a directory|cannot rename file over directory", PathIsDirectory),
    (r"not a directory|cannot rename directory over", PathNotDirectory),
    (r"(directory|file) exists", PathExists),
    (r"directory not empty", DirectoryNotEmpty),
    (r"file too large", _too_large),
    (r"filesystem full|too many", _full),
]
