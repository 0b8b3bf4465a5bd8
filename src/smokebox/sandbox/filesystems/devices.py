"""What a shell expects in /dev, for trees whose root is a filesystem of ours."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from smokebox.errors import AccessDenied, PathIsDirectory, PathNotDirectory, PathNotFound
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem

if TYPE_CHECKING:
    from collections.abc import Mapping

# As much as the shell's own /dev gives in one read.
_ZEROES = 1_048_576
_RANDOM = 8_192

_DEVICE = Entry("file", mode=0o666)
_NAMES = ("null", "random", "urandom", "zero")


class DeviceFilesystem(Filesystem):
    """`null`, `zero`, `random` and `urandom`: what is written to them is gone."""

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
    raise AccessDenied(path, f"{path} holds devices only.", hint="Write somewhere else.")
