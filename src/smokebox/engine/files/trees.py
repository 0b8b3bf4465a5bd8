"""Walking, removing and copying whole directories below a hostile root, by descriptors.

Nothing here follows a symlink or opens `..`, and trees may have any depth. A concurrent rename
only changes what is found below the directory that the caller opened.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat as stat_bits
from typing import TYPE_CHECKING, NamedTuple

from smokebox.engine.files.descriptors import (
    LIST,
    READ,
    REPLACED,
    SEARCH,
    check_regular,
    closing,
    is_kernel_file,
    not_regular,
    open_beneath,
    open_child,
    refuse_kernel_file,
)
from smokebox.engine.files.replacement import (
    Replacement,
    copy_content,
    copy_owner,
    rename_in,
    temporary_name,
)
from smokebox.engine.workers import checkpoint
from smokebox.errors import AccessDenied, DirectoryNotEmpty, LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_NAMES = 1_000_000

_BATCH = 10_000
_MAX_OPEN_LEVELS = 48
_MAX_PASSES = 100
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


class TreeEntry(NamedTuple):
    """One entry of a walk: its relative path, and its name in an open directory."""

    path: str
    folder: int
    name: str
    stat: os.stat_result


def lstat(parent: int, name: str) -> os.stat_result | None:
    """Return the status of a name in a directory, or None if there is none."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def names_in(fd: int) -> list[str]:
    """Return the sorted names in a directory; raises `LimitReached` above a million."""
    with os.scandir(fd) as entries:
        names = [entry.name for entry in itertools.islice(entries, MAX_NAMES + 1)]
    if len(names) > MAX_NAMES:
        raise LimitReached(
            f"a directory with more than {MAX_NAMES} names is not listed.",
            hint="List it with a command.",
            limit=MAX_NAMES,
        )
    return sorted(names)


def walk(
    top: int,
    *,
    recursive: bool = True,
    lenient: bool = False,
    one_filesystem: bool = False,
    avoid: os.stat_result | None = None,
    skip: Callable[[str], bool] | None = None,
) -> Iterator[TreeEntry]:
    """Yield the entries of a directory and, if `recursive`, of those below it; parents first.

    Kernel filesystems and the directory `avoid` are not entered, nor other file systems with
    `one_filesystem`. Paths for which `skip` returns true are omitted. A directory that may not
    be read raises, unless `lenient`.
    """
    pending = [""]
    device = os.fstat(top).st_dev if one_filesystem else None
    while pending:
        folder = pending.pop()
        try:
            fd = open_beneath(top, folder, LIST)
        except OSError as error:
            if folder and (error.errno in REPLACED or (lenient and error.errno in _FORBIDDEN)):
                continue
            raise OSError(error.errno, error.strerror, folder) from error
        with closing(fd):
            if folder and (is_kernel_file(fd) or device not in (None, os.fstat(fd).st_dev)):
                continue
            folders: list[str] = []
            for entry in _entries(fd, folder):
                if skip is not None and skip(entry.path):
                    continue
                yield entry
                avoided = avoid is not None and os.path.samestat(entry.stat, avoid)
                if stat_bits.S_ISDIR(entry.stat.st_mode) and not avoided:
                    folders.append(entry.path)
            if recursive:
                pending.extend(reversed(folders))


def _entries(fd: int, folder: str) -> Iterator[TreeEntry]:
    for name in names_in(fd):
        checkpoint()
        found = lstat(fd, name)
        if found is not None:
            yield TreeEntry(f"{folder}/{name}" if folder else name, fd, name, found)


class _RemovalLevel:
    """A directory that is being emptied: files are removed, directories kept to enter."""

    def __init__(self, parent: int, name: str) -> None:
        self.name = name
        self.fd = _open_for_removal(parent, name)
        self.folders: list[str] = []
        self.passes = 0
        self._listed = False

    def remove_files(self) -> None:
        """Remove files until only directories are left, or some directories were found."""
        while not self._listed and not self.folders:
            with os.scandir(self.fd) as entries:
                batch = list(itertools.islice(entries, _BATCH))
            self._listed = len(batch) < _BATCH
            for entry in batch:
                checkpoint()
                if entry.is_dir(follow_symlinks=False) or not self.unlink(entry.name):
                    self.folders.append(entry.name)

    def unlink(self, name: str) -> bool:
        """Remove a file; return False for a directory."""
        with contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=self.fd)
            except IsADirectoryError:
                return False
            except PermissionError:
                _permit(self.fd)
                os.unlink(name, dir_fd=self.fd)
        return True

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        try:
            os.rmdir(name, dir_fd=self.fd)
        except PermissionError:
            _permit(self.fd)
            os.rmdir(name, dir_fd=self.fd)

    def list_again(self, path: str) -> None:
        """List it again for names that were added meanwhile, up to a limit."""
        self.passes += 1
        self._listed = False
        if self.passes > _MAX_PASSES:
            raise DirectoryNotEmpty(
                path,
                f"{path} is filled faster than it can be emptied.",
                hint="Stop what writes to it.",
            )


def remove_tree(parent: int, name: str, path: str, *, one_filesystem: bool = False) -> None:
    """Remove a directory with everything in it. Symlinks are removed, not followed.

    With `one_filesystem`, raises for a directory of another file system. `path` is for errors.
    """
    levels = [_RemovalLevel(parent, name)]
    device = os.fstat(levels[0].fd).st_dev if one_filesystem else None
    try:
        while levels:
            checkpoint()
            level = levels[-1]
            refuse_kernel_file(level.fd, path)
            if device not in (None, os.fstat(level.fd).st_dev):
                raise AccessDenied(path, f"something is mounted in {path}.", hint="Unmount it.")
            level.remove_files()
            if level.folders:
                _enter(levels, level.folders.pop())
                continue
            if _remove_emptied(level, levels[-2] if len(levels) > 1 else None, parent, path):
                os.close(levels.pop().fd)
    finally:
        for level in levels:
            os.close(level.fd)


def _enter(levels: list[_RemovalLevel], name: str) -> None:
    level = levels[-1]
    if len(levels) >= _MAX_OPEN_LEVELS and _hoist(level, name, levels[0]):
        return
    try:
        try:
            levels.append(_RemovalLevel(level.fd, name))
        except PermissionError:
            # The directory that it is in may be listed and not entered.
            _permit(level.fd)
            levels.append(_RemovalLevel(level.fd, name))
    except OSError as error:
        # It may have been replaced by a file or a symlink.
        if error.errno not in REPLACED or not level.unlink(name):
            raise


def _hoist(level: _RemovalLevel, name: str, top: _RemovalLevel) -> bool:
    """Move a directory up to the top, so that depth costs no descriptors."""
    temporary = temporary_name(fresh=True)
    try:
        os.rename(name, temporary, src_dir_fd=level.fd, dst_dir_fd=top.fd)
    except OSError:
        return False
    top.folders.append(temporary)
    return True


def _remove_emptied(
    level: _RemovalLevel, above: _RemovalLevel | None, parent: int, path: str
) -> bool:
    try:
        if above is not None:
            above.rmdir(level.name)
        else:
            os.rmdir(level.name, dir_fd=parent)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        level.list_again(path)
        return False
    return True


def _open_for_removal(parent: int, name: str) -> int:
    try:
        return open_child(parent, name, LIST)
    except PermissionError:
        with closing(open_child(parent, name, SEARCH)) as fd:
            _permit(fd)
        return open_child(parent, name, LIST)


def _permit(fd: int) -> None:
    # Root inside may enter and change every directory; outside it can be an ordinary user.
    os.chmod(f"/proc/self/fd/{fd}", 0o700)


def copy_tree(source: int, target: int, path: str, *, preserve: bool = False) -> None:
    """Copy the content of a directory into another with modes, symlinks as symlinks.

    `preserve` keeps owners and times too. Existing files are replaced. `path` is for errors.
    """
    directories = [("", os.fstat(source))]
    for entry in walk(source, avoid=os.fstat(target)):
        if os.path.samestat(entry.stat, os.fstat(target)):
            continue
        with closing(open_beneath(target, os.path.dirname(entry.path), SEARCH)) as folder:
            if stat_bits.S_ISDIR(entry.stat.st_mode):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(entry.name, 0o700, dir_fd=folder)
                directories.append((entry.path, entry.stat))
            else:
                _copy_entry(entry, folder, f"{path}/{entry.path}", preserve)
    # Last, as a read-only mode or a time would not outlast the copying of the content.
    for relative, found in reversed(directories):
        with closing(open_beneath(target, relative, LIST)) as fd:
            if preserve:
                copy_owner(found, fd)
                os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fchmod(fd, stat_bits.S_IMODE(found.st_mode))


def _copy_entry(entry: TreeEntry, target: int, path: str, preserve: bool) -> None:
    mode = entry.stat.st_mode
    if stat_bits.S_ISREG(mode):
        copy_file(entry.folder, entry.name, target, entry.name, path, preserve=preserve)
    elif stat_bits.S_ISLNK(mode):
        copy_link(entry.folder, entry.name, target, entry.name)
    elif stat_bits.S_ISFIFO(mode):
        os.mkfifo(entry.name, stat_bits.S_IMODE(mode), dir_fd=target)
    else:
        raise not_regular(path, mode)


def copy_file(
    source: int, name: str, target: int, target_name: str, path: str, *, preserve: bool = False
) -> None:
    """Copy a file of one directory to a name in another. `path` is for errors."""
    with closing(open_child(source, name, READ)) as fd:
        check_regular(fd, path)
        copy_open_file(fd, target, target_name, preserve=preserve)


def copy_open_file(fd: int, target: int, target_name: str, *, preserve: bool = False) -> None:
    """Copy an open file to a name in a directory."""
    found = os.fstat(fd)
    with Replacement(target, target_name, lstat(target, target_name)) as file:
        copy_content(fd, file.fd)
        file.mode = stat_bits.S_IMODE(found.st_mode)
        if preserve:
            file.like = found
            os.utime(file.fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def copy_link(source: int, name: str, target: int, target_name: str) -> None:
    """Copy a symlink of one directory to a name in another."""
    temporary = temporary_name(fresh=True)
    os.symlink(os.readlink(name, dir_fd=source), temporary, dir_fd=target)
    try:
        rename_in(target, temporary, target_name)
    except BaseException:
        os.unlink(temporary, dir_fd=target)
        raise
