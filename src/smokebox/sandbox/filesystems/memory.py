"""Files in memory, with a quota."""

from __future__ import annotations

import os
import posixpath
import threading
import time
from typing import TYPE_CHECKING, Literal, NoReturn

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
    StorageFull,
    SymlinkLoop,
)
from smokebox.foundation.paths import check_path
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem, check_limit, check_move

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


MAX_NAME = 255

_FILE_MODE, _DIRECTORY_MODE, _SYMLINK_MODE = 0o644, 0o755, 0o777


class _Node:
    """File, directory or symlink; holds `data`, `children` or `target` accordingly."""

    __slots__ = ("_entry", "children", "data", "kind", "mode", "mtime", "target")

    def __init__(self, kind: Literal["file", "directory", "symlink"], mode: int) -> None:
        self.kind = kind
        self.mode = mode
        self.mtime = time.time()
        self.data: bytes | bytearray = b""
        self.children: dict[str, _Node] = {}
        self.target = ""
        self._entry: Entry | None = None

    @property
    def size(self) -> int:
        return len(self.data) or len(self.target)

    @property
    def entry(self) -> Entry:
        """Return the entry, cached until the node changes: a large listing needs thousands."""
        if self._entry is None:
            self._entry = Entry(self.kind, self.size, self.mtime, self.mode)
        return self._entry

    def touch(self) -> None:
        self.mtime = time.time()
        self._entry = None

    def nodes(self) -> Iterator[_Node]:
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())


class MemoryFilesystem(Filesystem):
    """Files that live as long as this object, within a quota of bytes and names.

    None lifts a limit. A write that does not fit is refused before anything changes.
    """

    def __init__(
        self,
        *,
        quota: int | None = 512 * 1024 * 1024,
        max_file_size: int | None = 128 * 1024 * 1024,
        max_files: int | None = 100_000,
    ) -> None:
        for option, limit in (
            ("quota", quota),
            ("max_file_size", max_file_size),
            ("max_files", max_files),
        ):
            check_limit(option, limit)
        self._quota = quota
        self._max_file_size = max_file_size
        self._max_files = max_files
        self._root = _Node("directory", _DIRECTORY_MODE)
        self._lock = threading.RLock()
        self.used = 0
        self.files = 0

    def read(self, path: str) -> bytes:
        with self._lock:
            node = self._file(path)
            if isinstance(node.data, bytearray):
                node.data = bytes(node.data)
            return node.data

    def write(self, path: str, data: bytes) -> None:
        with self._lock:
            parent, name = self._parent(path)
            node = parent.children.get(name)
            if node is None:
                self._check_quota(path, len(data), len(data))
                node = self._add(path, parent, name, _Node("file", _FILE_MODE))
            else:
                _check_writable(path, node)
                self._check_quota(path, len(data), len(data) - node.size)
            self.used += len(data) - node.size
            node.data = bytes(data)
            node.touch()

    def append(self, path: str, data: bytes) -> None:
        with self._lock:
            parent, name = self._parent(path)
            node = parent.children.get(name)
            if node is None:
                return self.write(path, data)
            _check_writable(path, node)
            self._check_quota(path, node.size + len(data), len(data))
            if isinstance(node.data, bytes):
                node.data = bytearray(node.data)
            node.data += data
            self.used += len(data)
            node.touch()

    def lstat(self, path: str) -> Entry:
        entry = self.peek(path)
        if entry is None:
            raise PathNotFound(path)
        return entry

    def peek(self, path: str) -> Entry | None:
        node = self._root
        with self._lock:
            for name in path[1:].split("/") if path != "/" else ():
                child = node.children.get(name)
                if child is None:
                    if node.kind != "directory":
                        raise PathNotDirectory(path)
                    return None
                node = child
            return node.entry

    def listdir(self, path: str) -> Mapping[str, Entry]:
        with self._lock:
            node = self._node(path)
            if node.kind != "directory":
                raise PathNotDirectory(path)
            return {name: child.entry for name, child in node.children.items()}

    def mkdir(self, path: str) -> None:
        with self._lock:
            if path == "/":
                raise PathExists(path)
            parent, name = self._parent(path)
            if name in parent.children:
                raise PathExists(path)
            self._add(path, parent, name, _Node("directory", _DIRECTORY_MODE))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        with self._lock:
            _check_not_root(path)
            parent, name = self._parent(path)
            node = self._node(path)
            if node.children and not recursive:
                raise DirectoryNotEmpty(path)
            self._remove_node(parent, name)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            _check_not_root(source)
            node = self._node(source)
            if source == target:
                return
            check_move(source, target, node.entry, self.peek(target))
            _check_not_root(target)
            parent, name = self._parent(target)
            _check_name(target, name)
            existing = parent.children.get(name)
            if existing is not None:
                if existing.children:
                    raise DirectoryNotEmpty(target)
                self._remove_node(parent, name)
            old_parent, old_name = self._parent(source)
            parent.children[name] = old_parent.children.pop(old_name)
            parent.touch()
            old_parent.touch()

    def symlink(self, target: str, path: str) -> None:
        with self._lock:
            if path == "/":
                raise PathExists(path)
            parent, name = self._parent(path)
            if name in parent.children:
                raise PathExists(path)
            self._check_quota(path, len(target), len(target))
            node = self._add(path, parent, name, _Node("symlink", _SYMLINK_MODE))
            node.target = target
            self.used += len(target)

    def readlink(self, path: str) -> str:
        with self._lock:
            node = self._node(path)
            if node.kind != "symlink":
                raise PathError(path, f"not a symlink: {path}")
            return node.target

    def chmod(self, path: str, mode: int) -> None:
        with self._lock:
            node = self._node(path)
            if node.kind == "symlink":
                raise SymlinkLoop(path)
            node.mode = mode & 0o7777
            # Permissions are not content: the modification time stays.
            node._entry = None

    def touch(self, path: str, mtime: float) -> None:
        with self._lock:
            node = self._node(path)
            node.mtime = mtime
            node._entry = None

    def _node(self, path: str) -> _Node:
        node = self._root
        if path == "/":
            return node
        for name in path[1:].split("/"):
            child = node.children.get(name)
            if child is None:
                raise (PathNotFound if node.kind == "directory" else PathNotDirectory)(path)
            node = child
        return node

    def _file(self, path: str) -> _Node:
        node = self._node(path)
        if node.kind == "directory":
            raise PathIsDirectory(path)
        if node.kind == "symlink":
            raise SymlinkLoop(path)
        return node

    def _parent(self, path: str) -> tuple[_Node, str]:
        """Return the directory that holds `path`, and the name in it."""
        head, _, name = path.rpartition("/")
        if not name:
            raise PathIsDirectory(path)
        try:
            parent = self._node(head or "/")
        except PathError as error:
            raise type(error)(path) from None
        if parent.kind != "directory":
            raise PathNotDirectory(path)
        return parent, name

    def _add(self, path: str, parent: _Node, name: str, node: _Node) -> _Node:
        _check_name(path, name)
        if self._max_files is not None and self.files >= self._max_files:
            raise StorageFull(
                path,
                f"no room for {path}: the limit of {self._max_files} files is reached.",
                hint="Remove files, or raise max_files=.",
            )
        parent.children[name] = node
        parent.touch()
        self.files += 1
        return node

    def _remove_node(self, parent: _Node, name: str) -> None:
        for node in parent.children.pop(name).nodes():
            self.used -= node.size
            self.files -= 1
        parent.touch()

    def _check_quota(self, path: str, size: int, growth: int) -> None:
        if self._max_file_size is not None and size > self._max_file_size:
            raise FileTooLarge(
                path,
                f"{path} would have {size} bytes; the limit is {self._max_file_size}.",
                hint="Write less, or raise max_file_size=.",
            )
        if self._quota is not None and self.used + growth > self._quota:
            raise StorageFull(
                path,
                f"no room for {path}: it needs {growth} more bytes, "
                f"and {max(0, self._quota - self.used)} of {self._quota} are free.",
                hint="Remove files, or raise quota=.",
            )


def _check_writable(path: str, node: _Node) -> None:
    if node.kind == "directory":
        raise PathIsDirectory(path)
    if node.kind == "symlink":
        raise SymlinkLoop(path)


def _check_not_root(path: str) -> None:
    if posixpath.normpath(path) == "/":
        raise AccessDenied(path, "the root of a filesystem cannot be moved or removed.")


def _check_name(path: str, name: str) -> None:
    if len(check_path(name).encode()) > MAX_NAME:
        raise PathError(path, f"the name is longer than {MAX_NAME} bytes: {path}")
    if "\n" in name:
        raise InvalidPath(
            f"the name {name!r} contains a line break, which scripts in the shell cannot use.",
            hint="Use another character.",
            path=path,
        )


# The amount that the shell's own /dev returns in one read.
_ZEROES = 1_048_576
_RANDOM = 8_192

_DEVICE = Entry("file", mode=0o666)
_NAMES = ("null", "random", "urandom", "zero")


class DeviceFilesystem(Filesystem):
    """`null`, `zero`, `random` and `urandom`; writes to them are discarded."""

    def read(self, path: str) -> bytes:
        self._check_device(path)
        if path == "/zero":
            return bytes(_ZEROES)
        return b"" if path == "/null" else os.urandom(_RANDOM)

    def write(self, path: str, data: bytes) -> None:
        self._check_device(path)

    def append(self, path: str, data: bytes) -> None:
        self._check_device(path)

    def lstat(self, path: str) -> Entry:
        if path == "/":
            return Entry("directory", mode=0o755)
        if path[1:] in _NAMES:
            return _DEVICE
        if path[1:].split("/")[0] in _NAMES:
            raise PathNotDirectory(path)
        raise PathNotFound(path)

    def listdir(self, path: str) -> Mapping[str, Entry]:
        if self.lstat(path) is _DEVICE:
            raise PathNotDirectory(path)
        return dict.fromkeys(_NAMES, _DEVICE)

    def mkdir(self, path: str) -> None:
        _refuse(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        _refuse(path)

    def _check_device(self, path: str) -> None:
        if self.lstat(path) is not _DEVICE:
            raise PathIsDirectory(path)


def _refuse(path: str) -> NoReturn:
    raise AccessDenied(path, f"{path} is in a directory of devices.", hint="Write somewhere else.")
