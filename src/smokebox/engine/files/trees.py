"""Whole directories below a hostile root: walked, removed and copied by descriptors.

Nothing here follows a link or climbs a `..`, and no depth is too deep: whoever moves
things meanwhile only changes what is found below the directory that was given.
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
    SEARCH,
    check_regular,
    closing,
    not_regular,
    of_kernel,
    open_beneath,
    open_child,
    refuse_kernel,
)
from smokebox.engine.files.replacement import Replacement, copy_content, keep_owner, temporary_name
from smokebox.engine.workers import checkpoint
from smokebox.errors import AccessDenied, DirectoryNotEmpty, LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_NAMES = 1_000_000

_BATCH = 10_000
_OPEN_LEVELS = 48
_PASSES = 100
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


class TreeEntry(NamedTuple):
    """One thing met on a walk: its relative path, and its name in an open directory."""

    path: str
    folder: int
    name: str
    stat: os.stat_result


def names_in(fd: int) -> list[str]:
    """The names in a directory, sorted. More than a million are refused."""
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
    stay: bool = False,
    avoid: os.stat_result | None = None,
    skip: Callable[[str], bool] | None = None,
) -> Iterator[TreeEntry]:
    """Everything in a directory and, if `recursive`, below it, each before what is in it.

    What the kernel makes up is not entered, nor is the directory `avoid`, and with `stay` no
    other file system; paths that are to `skip` are left out. Directories that may not be read
    raise, unless `lenient`.
    """
    pending = [""]
    device = os.fstat(top).st_dev if stay else None
    while pending:
        folder = pending.pop()
        try:
            fd = open_beneath(top, folder, LIST)
        except OSError as error:
            if folder and (error.errno in _CHANGED or (lenient and error.errno in _CLOSED)):
                continue
            raise OSError(error.errno, error.strerror, folder) from error
        with closing(fd):
            if folder and (of_kernel(fd) or device not in (None, os.fstat(fd).st_dev)):
                continue
            folders: list[str] = []
            for seen in _entries(fd, folder):
                if skip is not None and skip(seen.path):
                    continue
                yield seen
                if stat_bits.S_ISDIR(seen.stat.st_mode) and not same(seen.stat, avoid):
                    folders.append(seen.path)
            if recursive:
                pending.extend(reversed(folders))


def _entries(fd: int, folder: str) -> Iterator[TreeEntry]:
    for name in names_in(fd):
        checkpoint()
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            yield TreeEntry(f"{folder}/{name}" if folder else name, fd, name, found)


def same(one: os.stat_result, other: os.stat_result | None) -> bool:
    """Whether two are the same file."""
    return other is not None and (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


class _Level:
    """A directory that is being emptied: what is not a directory goes, those are kept to enter."""

    def __init__(self, parent: int, name: str) -> None:
        self.name = name
        self.fd = _open_for_removal(parent, name)
        self.folders: list[str] = []
        self.passes = 0
        self._listed = False

    def clear(self) -> None:
        """Remove files until only directories are left, or enough of those."""
        while not self._listed and not self.folders:
            with os.scandir(self.fd) as entries:
                batch = list(itertools.islice(entries, _BATCH))
            self._listed = len(batch) < _BATCH
            for entry in batch:
                checkpoint()
                if entry.is_dir(follow_symlinks=False) or not self.unlink(entry.name):
                    self.folders.append(entry.name)

    def unlink(self, name: str) -> bool:
        """Remove what is no directory, and say whether it was none."""
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

    def again(self, path: str) -> None:
        """Look for what came in while it was emptied, unless that happens for ever."""
        self.passes += 1
        self._listed = False
        if self.passes > _PASSES:
            raise DirectoryNotEmpty(
                path,
                f"{path} is filled faster than it can be emptied.",
                hint="Stop what writes to it.",
            )


def remove_tree(parent: int, name: str, path: str, *, stay: bool = False) -> None:
    """Remove a directory with all that is in it; links go, what they lead to stays.

    With `stay`, what is on another file system is refused.
    """
    levels = [_Level(parent, name)]
    device = os.fstat(levels[0].fd).st_dev if stay else None
    try:
        while levels:
            checkpoint()
            level = levels[-1]
            refuse_kernel(level.fd, path)
            if device not in (None, os.fstat(level.fd).st_dev):
                raise AccessDenied(path, f"something is mounted in {path}.", hint="Unmount it.")
            level.clear()
            if level.folders:
                _enter(levels, level.folders.pop())
                continue
            if _remove_emptied(level, levels[-2] if len(levels) > 1 else None, parent, path):
                os.close(levels.pop().fd)
    finally:
        for level in levels:
            os.close(level.fd)


def _enter(levels: list[_Level], name: str) -> None:
    level = levels[-1]
    if len(levels) >= _OPEN_LEVELS and _hoist(level, name, levels[0]):
        return
    try:
        levels.append(_Level(level.fd, name))
    except OSError as error:
        # Somebody put a file or a link in its place.
        if error.errno not in _CHANGED or not level.unlink(name):
            raise


def _hoist(level: _Level, name: str, top: _Level) -> bool:
    """Move a directory up to the top, so that depth costs no descriptors."""
    higher = temporary_name(fresh=True)
    try:
        os.rename(name, higher, src_dir_fd=level.fd, dst_dir_fd=top.fd)
    except OSError:
        return False
    top.folders.append(higher)
    return True


def _remove_emptied(level: _Level, above: _Level | None, parent: int, path: str) -> bool:
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
        level.again(path)
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
    # Root inside enters and changes every directory; whoever plays it outside may not yet.
    os.chmod(f"/proc/self/fd/{fd}", 0o700)


def copy_tree(source: int, target: int, path: str, *, preserve: bool = False) -> None:
    """Copy what is in a directory into another, links as links, with modes.

    `preserve` keeps owners and times too. Files that are there already are replaced.
    """
    directories = [("", os.fstat(source))]
    for seen in walk(source, avoid=os.fstat(target)):
        if same(seen.stat, os.fstat(target)):
            continue
        with closing(open_beneath(target, os.path.dirname(seen.path), SEARCH)) as into:
            if stat_bits.S_ISDIR(seen.stat.st_mode):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(seen.name, 0o700, dir_fd=into)
                directories.append((seen.path, seen.stat))
            else:
                _copy_entry(seen, into, f"{path}/{seen.path}", preserve)
    for relative, found in reversed(directories):
        with closing(open_beneath(target, relative, LIST)) as fd:
            _settle(fd, found, preserve)


def _copy_entry(seen: TreeEntry, into: int, path: str, preserve: bool) -> None:
    mode = seen.stat.st_mode
    if stat_bits.S_ISREG(mode):
        copy_file(seen.folder, seen.name, into, seen.name, path, preserve=preserve)
    elif stat_bits.S_ISLNK(mode):
        copy_link(seen.folder, seen.name, into, seen.name)
    elif stat_bits.S_ISFIFO(mode):
        os.mkfifo(seen.name, stat_bits.S_IMODE(mode), dir_fd=into)
    else:
        raise not_regular(path, mode)


def copy_file(
    source: int, name: str, target: int, other: str, path: str, *, preserve: bool = False
) -> None:
    """Copy a file of one directory to a name in another."""
    with closing(open_child(source, name, READ)) as fd:
        check_regular(fd, path)
        copy_open_file(fd, target, other, preserve=preserve)


def copy_open_file(fd: int, target: int, other: str, *, preserve: bool = False) -> None:
    """Copy an open file to a name in a directory."""
    found = os.fstat(fd)
    with Replacement(target, other, existing(target, other)) as file:
        copy_content(fd, file.fd)
        file.mode = stat_bits.S_IMODE(found.st_mode)
        if preserve:
            file.like = found
            os.utime(file.fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def copy_link(source: int, name: str, target: int, other: str) -> None:
    """Copy a symlink of one directory to a name in another."""
    temporary = temporary_name(fresh=True)
    os.symlink(os.readlink(name, dir_fd=source), temporary, dir_fd=target)
    try:
        os.rename(temporary, other, src_dir_fd=target, dst_dir_fd=target)
    except BaseException:
        os.unlink(temporary, dir_fd=target)
        raise


def existing(parent: int, name: str) -> os.stat_result | None:
    """What has a name in a directory, if anything."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _settle(fd: int, found: os.stat_result, preserve: bool) -> None:
    if preserve:
        keep_owner(fd, found)
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
    os.fchmod(fd, stat_bits.S_IMODE(found.st_mode))
