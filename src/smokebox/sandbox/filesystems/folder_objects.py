"""Folder of the host as a bucket: its files are the objects, its directories exist as they are."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from smokebox.errors import BucketNotFound, PathNotFound, from_os_error
from smokebox.sandbox.filesystems.filesystem import Entry
from smokebox.sandbox.filesystems.objects import (
    DIRECTORY,
    ObjectBody,
    ObjectEntry,
    ObjectListing,
    Objects,
    ObjectWalk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

    from obstore.store import LocalStore

_MAX_NAME = 255
# Names that obstore gives to unfinished files.
_STAGED = re.compile(r"#\d+$")


class FolderObjects(Objects):
    """Objects in a folder: written atomically by obstore, read directly from the folder.

    Symlinks are neither shown nor followed, so that none leads outside.
    """

    marker = ""

    def __init__(self, store: LocalStore, prefix: str, label: str) -> None:
        super().__init__(store, prefix, label)
        self.root = os.path.realpath(store.prefix or "/")

    def check(self) -> None:
        """Raise `BucketNotFound` unless the folder exists."""
        if not os.path.isdir(self.root):
            raise BucketNotFound(
                f"there is no folder {self.root}.", hint="Create it first.", bucket=self.root
            )

    def is_valid_key(self, key: str) -> bool:
        """Return whether a file in the folder can have this key."""
        parts = key.split("/")
        if any(len(os.fsencode(part)) > _MAX_NAME or _STAGED.search(part) for part in parts):
            return False
        return super().is_valid_key(key)

    def listdir(self, directory: str) -> ObjectListing:
        """Return the entries of a directory; an empty listing if it does not exist."""
        found: dict[str, ObjectEntry] = {}
        try:
            with self._at(directory) as host_path, os.scandir(host_path) as items:
                for item in items:
                    kind = _dir_entry(item) if self._is_visible(item.name) else None
                    if kind is not None:
                        found[item.name] = kind
        except (FileNotFoundError, NotADirectoryError):
            return ObjectListing({}, exists=directory == "")
        return ObjectListing(found, exists=True)

    def _is_visible(self, name: str) -> bool:
        try:
            name.encode()
        except UnicodeEncodeError:
            return False
        return self.is_valid_key(name)

    def walk(self, directory: str, after: str = "", limit: int = 1000) -> ObjectWalk:
        """Report only whether the directory exists; a folder is listed one directory at a time."""
        return ObjectWalk([], ended=False, exists=self.listdir(directory).exists)

    def head(self, key: str) -> ObjectEntry | None:
        """Return the entry of a file, or None."""
        try:
            with self._at(key) as host_path:
                found = _file_entry(os.lstat(host_path)) if os.path.isfile(host_path) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found

    def get(self, key: str, unless: str = "") -> ObjectBody | None:
        """Return a file's body, or None if its version is `unless`."""
        with self._at(key) as host_path, open(host_path, "rb") as file:
            version = _file_entry(os.fstat(file.fileno())).version
            return None if version == unless else ObjectBody(file.read(), version)

    def put(self, key: str, data: bytes | BinaryIO, size: int | None = None) -> str:
        """Create or replace a file atomically."""
        with self._at(key):
            super().put(key, data, size)
        return ""

    def copy(self, source: str, target: str) -> None:
        """Copy a file inside the folder."""
        with self._at(source), self._at(target):
            super().copy(source, target)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files. A missing file is not an error."""
        for key in keys:
            with self._at(key):
                super().delete([key])

    def make_directory(self, key: str) -> None:
        """Create a directory."""
        with self._at(key) as host_path:
            os.mkdir(host_path)

    def drop_directory(self, key: str) -> None:
        """Remove an empty directory."""
        with self._at(key) as host_path:
            os.rmdir(host_path)

    def remove_tree(self, directory: str) -> None:
        """Remove a directory tree."""
        with self._at(directory) as host_path:
            shutil.rmtree(host_path)

    def move_tree(self, source: str, target: str) -> None:
        """Move a directory tree."""
        with self._at(source) as old, self._at(target) as new:
            os.rename(old, new)

    @contextmanager
    def _at(self, key: str) -> Iterator[str]:
        """Return the host path of a key, after checking that no component is a symlink."""
        host_path = os.path.join(self.root, self.full(key)).rstrip("/") or "/"
        try:
            if os.path.realpath(host_path) != host_path:
                raise PathNotFound(f"/{key}")
            yield host_path
        except PathNotFound:
            raise
        except OSError as error:
            raise from_os_error(error, f"/{key}") from error


def _dir_entry(item: os.DirEntry[str]) -> ObjectEntry | None:
    if item.is_dir(follow_symlinks=False):
        return DIRECTORY
    with suppress(FileNotFoundError):
        if item.is_file(follow_symlinks=False):
            return _file_entry(item.stat(follow_symlinks=False))
    return None


def _file_entry(status: os.stat_result) -> ObjectEntry:
    version = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectEntry(Entry("file", status.st_size, status.st_mtime), version)
