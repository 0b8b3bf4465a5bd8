"""Folder of the host that no path inside it can escape."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import weakref
from contextlib import contextmanager
from io import FileIO
from typing import TYPE_CHECKING

from smokebox.errors import (
    AccessDenied,
    FileTooLarge,
    InvalidPath,
    PathError,
    PathIsDirectory,
    SymlinkLoop,
    from_os_error,
)
from smokebox.foundation.ids import new_id
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem, check_limit, check_move

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = _PATH | os.O_DIRECTORY
# Without O_NONBLOCK, opening a FIFO would block until the other end is opened.
_CONTENT = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class HostFilesystem(Filesystem):
    """Contents of `folder` on the host, read-only unless `read_only=False`.

    Every path is opened component by component from the open folder, and no symlink is followed, so
    that neither a link nor a race leads outside. Files are replaced, never written in place: a hard
    link to a file elsewhere keeps its content. Names that are not UTF-8 are left out, and pipes and
    devices are not opened.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        read_only: bool = True,
        max_file_size: int | None = 512 * 1024 * 1024,
    ) -> None:
        check_limit("max_file_size", max_file_size)
        self.read_only = read_only
        self._max_file_size = max_file_size
        self._folder: _Folder | None = _Folder(os.fspath(folder))

    def close(self) -> None:
        self._folder = None

    def read(self, path: str) -> bytes:
        with self._parent(path) as (parent, name), _opened(path, parent, name) as file:
            limit = self._max_file_size
            if limit is not None and (size := os.fstat(file).st_size) > limit:
                raise FileTooLarge(
                    path,
                    f"{path} has {size} bytes; at most {limit} are read at once.",
                    hint="Mount it with a higher max_file_size=.",
                )
            return FileIO(file, closefd=False).readall()

    def write(self, path: str, data: bytes) -> None:
        self._check_writable(path)
        with self._parent(path) as (parent, name):
            _replace(parent, name, data, _mode_to_keep(path, parent, name))

    def append(self, path: str, data: bytes) -> None:
        self._check_writable(path)
        with self._parent(path) as (parent, name):
            if _mode_to_keep(path, parent, name) is None:
                _replace(parent, name, data, None)
                return
            with _opened(path, parent, name, os.O_RDWR | os.O_APPEND) as file:
                if os.fstat(file).st_nlink == 1:
                    _append(file, data)
                    return
        self.write(path, self.read(path) + data)

    def lstat(self, path: str) -> Entry:
        with self._parent(path) as (parent, name):
            return _entry(os.stat(name, dir_fd=parent, follow_symlinks=False))

    def listdir(self, path: str) -> Mapping[str, Entry]:
        with self._parent(path) as (parent, name):
            directory = os.open(name, _CONTENT | os.O_DIRECTORY, dir_fd=parent)
            try:
                with os.scandir(directory) as found:
                    return dict(_listed(found))
            finally:
                os.close(directory)

    def mkdir(self, path: str) -> None:
        self._check_writable(path)
        with self._parent(path) as (parent, name):
            os.mkdir(name, dir_fd=parent)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self._check_writable(path)
        _check_not_root(path)
        with self._parent(path) as (parent, name):
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=parent)
            elif recursive:
                shutil.rmtree(name, dir_fd=parent)
            else:
                os.rmdir(name, dir_fd=parent)

    def rename(self, source: str, target: str) -> None:
        self._check_writable(source)
        _check_not_root(source)
        check_move(source, target, self.lstat(source), self.peek(target))
        with (
            self._parent(target) as (new_parent, new_name),
            self._parent(source) as (parent, name),
        ):
            os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)

    def symlink(self, target: str, path: str) -> None:
        self._check_writable(path)
        with self._parent(path) as (parent, name):
            os.symlink(target, name, dir_fd=parent)

    def readlink(self, path: str) -> str:
        if self.lstat(path).kind != "symlink":
            raise PathError(path, f"not a symlink: {path}")
        with self._parent(path) as (parent, name):
            return os.fsencode(os.readlink(name, dir_fd=parent)).decode(errors="replace")

    def chmod(self, path: str, mode: int) -> None:
        self._check_writable(path)
        with self._parent(path) as (parent, name):
            file = os.open(name, _PATH, dir_fd=parent)
            try:
                if stat.S_ISLNK(os.fstat(file).st_mode):
                    raise SymlinkLoop(path)
                # fchmod refuses O_PATH, and other modes need read permission first.
                os.chmod(f"/proc/self/fd/{file}", mode & 0o777)
            finally:
                os.close(file)

    def touch(self, path: str, mtime: float) -> None:
        self._check_writable(path)
        with self._parent(path) as (parent, name):
            os.utime(name, (mtime, mtime), dir_fd=parent, follow_symlinks=False)

    def _check_writable(self, path: str) -> None:
        if self.read_only:
            raise AccessDenied(
                path,
                f"{path} is in a folder that is mounted read-only.",
                hint="Mount it with HostFilesystem(folder, read_only=False) to change it.",
                read_only=True,
            )

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the directory that holds `path`, and translate errors."""
        folder = self._folder
        if folder is None:
            raise AccessDenied(path, f"{path} cannot be used: its filesystem is closed.")
        names = [name for name in path.split("/") if name] or ["."]
        if ".." in names:
            raise InvalidPath(f"{path!r} is not a normal path.", hint="Resolve it.", path=path)
        try:
            with _walked(folder, names[:-1]) as parent:
                yield parent, names[-1]
        except PathError:
            raise
        except OSError as error:
            # Not `from error`, which would name files of the host.
            raise from_os_error(error, path) from None
        except UnicodeEncodeError:
            raise InvalidPath(
                f"the path {path!r} is not valid UTF-8.", hint="Rename it.", path=ascii(path)
            ) from None


class _Folder:
    """Open directory, closed after the last call that uses it.

    Closing at once would free its descriptor number for another file while a call on another thread
    still uses it.
    """

    def __init__(self, path: str) -> None:
        try:
            self.file = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, path) from None
        weakref.finalize(self, os.close, self.file)


@contextmanager
def _walked(folder: _Folder, names: list[str]) -> Iterator[int]:
    """Open the directory that `names` lead to, one component at a time."""
    opened = folder.file
    try:
        for name in names:
            inner = os.open(name, _DIRECTORY, dir_fd=opened)
            if opened != folder.file:
                os.close(opened)
            opened = inner
        yield opened
    finally:
        if opened != folder.file:
            os.close(opened)


@contextmanager
def _opened(path: str, parent: int, name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a regular file; anything else is refused."""
    file = os.open(name, flags | _CONTENT, dir_fd=parent)
    try:
        _check_regular(path, os.fstat(file).st_mode)
        yield file
    finally:
        os.close(file)


def _check_regular(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise PathIsDirectory(path)
    if stat.S_ISLNK(mode):
        raise SymlinkLoop(path)
    if not stat.S_ISREG(mode):
        raise AccessDenied(path, f"{path} is not a regular file, and is not opened.")


def _mode_to_keep(path: str, parent: int, name: str) -> int | None:
    """Return the permissions of a writable file, or None if there is none."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    _check_regular(path, mode)
    # Replacing needs permission on the directory only; writing needs it on the file.
    if not os.access(name, os.W_OK, dir_fd=parent, effective_ids=True):
        raise AccessDenied(path)
    return mode & 0o777


def _replace(parent: int, name: str, data: bytes, mode: int | None) -> None:
    temporary = f".{new_id('smokebox')}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o666, dir_fd=parent)
    try:
        try:
            _write(file, data)
            if mode is not None:
                os.fchmod(file, mode)
        finally:
            os.close(file)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise


def _append(file: int, data: bytes) -> None:
    size = os.fstat(file).st_size
    try:
        _write(file, data)
    except BaseException:
        os.ftruncate(file, size)
        raise


def _write(file: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(file, remaining) :]


def _listed(found: Iterator[os.DirEntry[str]]) -> Iterator[tuple[str, Entry]]:
    for item in found:
        # Removed since it was listed, or its name is not UTF-8.
        with contextlib.suppress(FileNotFoundError, UnicodeEncodeError):
            item.name.encode()
            yield item.name, _entry(item.stat(follow_symlinks=False))


def _entry(found: os.stat_result) -> Entry:
    mode = found.st_mode
    if stat.S_ISREG(mode):
        return Entry("file", found.st_size, found.st_mtime, mode & 0o7777)
    if stat.S_ISDIR(mode):
        return Entry("directory", 0, found.st_mtime, mode & 0o7777)
    if stat.S_ISLNK(mode):
        return Entry("symlink", found.st_size, found.st_mtime, mode & 0o7777)
    return Entry("other", 0, found.st_mtime, mode & 0o7777)


def _check_not_root(path: str) -> None:
    if path == "/":
        raise AccessDenied(path, "the root of a filesystem cannot be moved or removed.")
