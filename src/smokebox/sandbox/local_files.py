"""File operations of the contract on host files, as blocking functions.

Paths are absolute and normalized. Every function raises the classes of `smokebox.errors`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat as stat_module
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from smokebox.errors import (
    AccessDenied,
    PathError,
    PathIsDirectory,
    PathNotDirectory,
    from_os_error,
)
from smokebox.foundation.ids import new_id
from smokebox.sandbox.glob import GlobEntry
from smokebox.types import FileInfo, FileType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG)


def _path_errors(operation: Callable[P, R]) -> Callable[P, R]:
    """Translate `OSError` to the classes of `smokebox.errors`."""

    @wraps(operation)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(*args, **kwargs)
        except PathError:
            raise
        except OSError as error:
            raise from_os_error(error, str(args[0])) from error

    return translated


@_path_errors
def read(path: str) -> bytes:
    """Return the bytes of a regular file."""
    # Without O_NONBLOCK, opening a FIFO would block until a writer opens it.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat_module.S_ISREG(mode):
            raise _not_regular(path, mode)
        return file.read()


@_path_errors
def write(path: str, data: bytes) -> None:
    """Create or replace a file and its parent directories atomically."""
    try:
        before: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        before = None
    if before is not None and stat_module.S_ISCHR(before.st_mode):
        _write_device(path, data)
        return
    if before is not None and not stat_module.S_ISREG(before.st_mode):
        raise _not_regular(path, before.st_mode)
    # A rename needs permission on the directory only, and would replace a read-only file.
    if before is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    # Write through symlinks, including a dangling one: the link stays a link.
    target = os.path.realpath(path)
    created = _create_parents(target)
    try:
        _replace(target, data, before)
    except BaseException:
        _remove_directories(created)
        raise


@_path_errors
def stat(path: str, *, follow_symlinks: bool = True) -> FileInfo:
    """Return the metadata of `path`."""
    own = os.lstat(path)
    is_symlink = stat_module.S_ISLNK(own.st_mode)
    found = os.stat(path) if is_symlink and follow_symlinks else own
    return FileInfo(
        path=path,
        type=file_type(found.st_mode),
        is_symlink=is_symlink,
        size=found.st_size,
        mtime=found.st_mtime,
        mode=stat_module.S_IMODE(found.st_mode),
    )


@_path_errors
def readdir(path: str) -> list[str]:
    """Return the sorted names in a directory; bytes that are not UTF-8 become `\\xNN`."""
    return sorted(display_name(name) for name in os.listdir(path))


@_path_errors
def exists(path: str) -> bool:
    """Return whether `path` exists and is visible to this process, following symlinks."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    return True


@_path_errors
def mkdir(path: str, *, recursive: bool = False) -> None:
    """Create a directory; `recursive` creates parents and accepts an existing one."""
    if not recursive:
        os.mkdir(path)
        return
    created = _create_parents(path)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        _remove_directories(created)
        raise


@_path_errors
def remove(path: str, *, recursive: bool = False, force: bool = False) -> None:
    """Remove a file or a symlink, or with `recursive` a directory."""
    if path == "/":
        raise AccessDenied(
            path, "the root directory cannot be removed.", hint="Pass a path inside it."
        )
    try:
        is_directory = stat_module.S_ISDIR(os.lstat(path).st_mode)
        if is_directory and not recursive:
            raise PathIsDirectory(path, hint="Pass recursive=True to remove it.")
        if is_directory:
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        if not force:
            raise


def scan(path: str) -> Iterator[GlobEntry]:
    """List a directory for `glob_paths`. Raises OSError if there is none."""
    with os.scandir(path) as entries:
        for entry in entries:
            yield GlobEntry(display_name(entry.name), _target_type(entry), entry.is_symlink())


def display_name(name: str) -> str:
    """Return a name as text: a byte that is not UTF-8 becomes `\\xNN`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def file_type(mode: int) -> FileType:
    """Return the kind of file for a mode."""
    if stat_module.S_ISREG(mode):
        return "file"
    if stat_module.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat_module.S_ISLNK(mode) else "other"


def _target_type(entry: os.DirEntry[str]) -> FileType:
    with contextlib.suppress(OSError):
        if entry.is_dir():
            return "directory"
        if entry.is_file():
            return "file"
        # Neither, or a dangling symlink, for which is_dir and is_file return False.
        return file_type(entry.stat().st_mode)
    return "symlink" if entry.is_symlink() else "other"


def _not_regular(path: str, mode: int) -> PathError:
    if stat_module.S_ISDIR(mode):
        return PathIsDirectory(path)
    return PathError(path, f"not a regular file: {path}.", hint="Use a command to access it.")


def _create_parents(path: str) -> list[str]:
    """Create the missing directories above `path`, or none of them, and return them."""
    missing: list[str] = []
    parent = os.path.dirname(path)
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        raise PathNotDirectory(parent)
    created: list[str] = []
    try:
        for directory in reversed(missing):
            # Another writer may have created it meanwhile.
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                created.append(directory)
    except OSError:
        _remove_directories(created)
        raise
    return created


def _remove_directories(directories: list[str]) -> None:
    for directory in reversed(directories):
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _replace(target: str, data: bytes, before: os.stat_result | None) -> None:
    temporary = os.path.join(os.path.dirname(target), f".{new_id('smokebox')}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if before is not None:
                _keep_owner_and_mode(fd, before)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _keep_owner_and_mode(fd: int, before: os.stat_result) -> None:
    own = os.fstat(fd)
    if (own.st_uid, own.st_gid) != (before.st_uid, before.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(fd, before.st_uid, before.st_gid)
    os.fchmod(fd, stat_module.S_IMODE(before.st_mode))


def _write_device(path: str, data: bytes) -> None:
    # /dev/null and similar devices are written to, never replaced.
    with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
        file.write(data)
