"""Files in memory, with a quota."""

from __future__ import annotations

import posixpath
import threading
import time
from typing import TYPE_CHECKING, Literal

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
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem, check_limit, check_move
from smokebox.sandbox.paths import check_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_NAME = 255

_FILE_MODE, _DIRECTORY_MODE, _SYMLINK_MODE = 0o644, 0o755, 0o777


class _Node:
    """A file, a directory or a symlink; `data`, `children` or `target` holds what it has."""

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
        """Made once for each state: listing a large directory asks for thousands."""
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
    """Files that live as long as this object, within a quota of bytes and of names.

    None lifts a limit. What does not fit is refused before anything changes.
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
                self._check_room(path, len(data), len(data))
                node = self._add(path, parent, name, _Node("file", _FILE_MODE))
            else:
                _check_writable(path, node)
                self._check_room(path, len(data), len(data) - node.size)
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
            self._check_room(path, node.size + len(data), len(data))
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
            self._drop(parent, name)

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
                self._drop(parent, name)
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
            self._check_room(path, len(target), len(target))
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
            # The permissions are not the content: the time stays.
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
        """The directory that holds `path`, and the name it has there."""
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

    def _drop(self, parent: _Node, name: str) -> None:
        for node in parent.children.pop(name).nodes():
            self.used -= node.size
            self.files -= 1
        parent.touch()

    def _check_room(self, path: str, size: int, growth: int) -> None:
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
        raise AccessDenied(path, "the root of a filesystem stays where it is.")


def _check_name(path: str, name: str) -> None:
    if len(check_path(name).encode()) > MAX_NAME:
        raise PathError(path, f"the name is longer than {MAX_NAME} bytes: {path}")
    if "\n" in name:
        raise InvalidPath(
            f"the name {name!r} holds a line break, which no script in the shell could use.",
            hint="Use another character.",
            path=path,
        )
