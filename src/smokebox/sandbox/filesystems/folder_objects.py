"""A folder as a bucket: objects are its files, and its directories are kept as they are."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from smokebox.errors import BucketNotFound, PathNotFound
from smokebox.sandbox.filesystems.filesystem import Entry, from_os_error
from smokebox.sandbox.filesystems.objects import DIRECTORY, Body, Found, Listed, Objects, Walked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

    from obstore.store import LocalStore

_MAX_NAME = 255
# What obstore calls a file until it is whole, and keeps for itself.
_STAGED = re.compile(r"#\d+$")


class FolderObjects(Objects):
    """Objects are put by obstore, whole or not at all, and read from the folder itself.

    Symlinks are not shown and not followed, so that nothing leads outside.
    """

    marker = ""

    def __init__(self, store: LocalStore, prefix: str, place: str) -> None:
        super().__init__(store, prefix, place)
        self.root = os.path.realpath(store.prefix or "/")

    def check(self) -> None:
        """Ask whether the folder is there."""
        if not os.path.isdir(self.root):
            raise BucketNotFound(
                f"there is no folder {self.root}.", hint="Make it first.", bucket=self.root
            )

    def names(self, key: str) -> bool:
        """Whether a file in the folder can have this key."""
        parts = key.split("/")
        if any(len(os.fsencode(part)) > _MAX_NAME or _STAGED.search(part) for part in parts):
            return False
        return super().names(key)

    def listdir(self, directory: str) -> Listed:
        """What is in a directory. Raises nothing for one that is not there."""
        found: dict[str, Found] = {}
        try:
            with self._at(directory) as place, os.scandir(place) as items:
                for item in items:
                    kind = _found(item) if self._shown(item.name) else None
                    if kind is not None:
                        found[item.name] = kind
        except (FileNotFoundError, NotADirectoryError):
            return Listed({}, exists=directory == "")
        return Listed(found, exists=True)

    def _shown(self, name: str) -> bool:
        try:
            name.encode()
        except UnicodeEncodeError:
            return False
        return self.names(name)

    def walk(self, directory: str, after: str = "", limit: int = 1000) -> Walked:
        """Whether the directory is there; a folder is listed one directory at a time."""
        return Walked([], ended=False, exists=self.listdir(directory).exists)

    def head(self, key: str) -> Found | None:
        """The file with this key."""
        try:
            with self._at(key) as place:
                found = _of(os.lstat(place)) if os.path.isfile(place) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found

    def get(self, key: str, unless: str = "") -> Body | None:
        """The bytes of a file; None where its version is `unless`."""
        with self._at(key) as place, open(place, "rb") as file:
            version = _of(os.fstat(file.fileno())).version
            return None if version == unless else Body(file.read(), version)

    def put(self, key: str, data: bytes | BinaryIO, size: int | None = None) -> str:
        """Make or replace a file, whole or not at all."""
        with self._at(key):
            super().put(key, data, size)
        return ""

    def copy(self, source: str, target: str) -> None:
        """Copy a file inside the folder."""
        with self._at(source), self._at(target):
            super().copy(source, target)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files. One that is gone already is no error."""
        for key in keys:
            with self._at(key):
                super().delete([key])

    def make_directory(self, key: str) -> None:
        """Make a directory."""
        with self._at(key) as place:
            os.mkdir(place)

    def drop_directory(self, key: str) -> None:
        """Remove an empty directory."""
        with self._at(key) as place:
            os.rmdir(place)

    def remove_tree(self, directory: str) -> None:
        """Remove a directory with all that is in it."""
        with self._at(directory) as place:
            shutil.rmtree(place)

    def move_tree(self, source: str, target: str) -> None:
        """Move a directory with all that is in it."""
        with self._at(source) as old, self._at(target) as new:
            os.rename(old, new)

    @contextmanager
    def _at(self, key: str) -> Iterator[str]:
        """The place of a key on the host, once no symlink is on the way to it."""
        place = os.path.join(self.root, self.full(key)).rstrip("/") or "/"
        try:
            if os.path.realpath(place) != place:
                raise PathNotFound(f"/{key}")
            yield place
        except PathNotFound:
            raise
        except OSError as error:
            raise from_os_error(error, f"/{key}") from error


def _found(item: os.DirEntry[str]) -> Found | None:
    if item.is_dir(follow_symlinks=False):
        return DIRECTORY
    with suppress(FileNotFoundError):
        if item.is_file(follow_symlinks=False):
            return _of(item.stat(follow_symlinks=False))
    return None


def _of(status: os.stat_result) -> Found:
    version = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return Found(Entry("file", status.st_size, status.st_mtime), version)
