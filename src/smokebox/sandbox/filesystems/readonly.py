"""A filesystem that can be looked at and not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from smokebox.errors import AccessDenied
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem

if TYPE_CHECKING:
    from collections.abc import Mapping


class ReadOnlyFilesystem(Filesystem):
    """What `inner` holds, with every change refused."""

    def __init__(self, inner: Filesystem) -> None:
        self.inner = inner

    def read(self, path: str) -> bytes:
        return self.inner.read(path)

    def lstat(self, path: str) -> Entry:
        return self.inner.lstat(path)

    def peek(self, path: str) -> Entry | None:
        return self.inner.peek(path)

    def listdir(self, path: str) -> Mapping[str, Entry]:
        return self.inner.listdir(path)

    def readlink(self, path: str) -> str:
        return self.inner.readlink(path)

    def write(self, path: str, data: bytes) -> None:
        _refuse(path)

    def append(self, path: str, data: bytes) -> None:
        _refuse(path)

    def mkdir(self, path: str) -> None:
        _refuse(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        _refuse(path)

    def rename(self, source: str, target: str) -> None:
        _refuse(source)

    def copy(self, source: str, target: str) -> None:
        _refuse(target)

    def symlink(self, target: str, path: str) -> None:
        _refuse(path)

    def chmod(self, path: str, mode: int) -> None:
        _refuse(path)

    def touch(self, path: str, mtime: float) -> None:
        _refuse(path)

    def refresh(self) -> None:
        self.inner.refresh()

    def close(self) -> None:
        self.inner.close()


def _refuse(path: str) -> NoReturn:
    raise AccessDenied(
        path,
        f"{path} is in a filesystem that is mounted read-only.",
        hint="Write somewhere else, or mount it without ReadOnlyFilesystem.",
        read_only=True,
    )
