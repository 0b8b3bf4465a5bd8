"""Files and directories that move or are copied to another place of the same root."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat as stat_bits
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import (
    LIST,
    closing,
    naming,
    not_regular,
    open_child,
    open_regular,
    refuse_kernel,
)
from smokebox.engine.files.replacement import temporary_name
from smokebox.engine.files.rooted import ResolvedPath, file_info, refuse_mount
from smokebox.engine.files.trees import (
    copy_file,
    copy_link,
    copy_open_file,
    copy_tree,
    existing,
    remove_tree,
    walk,
)
from smokebox.errors import LimitReached, PathError, PathIsDirectory, PathNotDirectory, PathNotFound
from smokebox.sandbox.globbing import glob_paths
from smokebox.sandbox.hostfiles import shown
from smokebox.types import DiskUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.files.rooted import Rooted
    from smokebox.sandbox.globbing import Found
    from smokebox.types import FileInfo


def rename(files: Rooted, source: str, target: str) -> None:
    """Give a file or directory another path, replacing a file or an empty directory there.

    Between filesystems, and for a directory of the image, it is copied and then removed.
    """
    with naming(source), files.place(source) as old:
        found = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False)
        refuse_mount(old, found, source)
        with naming(target), files.place(target) as new:
            try:
                os.rename(old.name, new.name, src_dir_fd=old.parent, dst_dir_fd=new.parent)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    raise _into_itself(target) from error
                if error.errno != errno.EXDEV:
                    raise
                _check_replaceable(old, new, target)
                _copy_whole(old, new, source, preserve=True)
                _remove(old, source)


def relocate(source: int, name: str, target: int, other: str, path: str) -> None:
    """Move what has a name in an open directory to a name in another, which is free.

    A directory of the image is copied and then removed. `path` is for errors.
    """
    try:
        os.rename(name, other, src_dir_fd=source, dst_dir_fd=target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        old, new = ResolvedPath(source, name, []), ResolvedPath(target, other, [])
        _copy_whole(old, new, path, preserve=True)
        _remove(old, path)


def move(files: Rooted, source: str, target: str) -> str:
    """As `rename`, but into a directory that is there. Returns where it is."""
    with contextlib.suppress(PathNotFound):
        if files.info(target).is_directory:
            target = posixpath.join(target, posixpath.basename(source))
    rename(files, source, target)
    return target


def copy(files: Rooted, source: str, target: str, *, recursive: bool = False) -> None:
    """Copy a file, or with `recursive` a directory, with modes; links in it stay links.

    A target that is not there appears whole. A directory is merged into one that is.
    """
    info = files.info(source)
    if info.is_directory:
        if not recursive:
            raise PathIsDirectory(source, hint="Pass recursive=True to copy it.")
        if f"{target}/".startswith(f"{source.rstrip('/')}/"):
            raise _into_itself(target)
        _copy_directory(files, source, target)
    elif info.is_file:
        _copy_one(files, source, target)
    else:
        raise PathError(source, f"not a regular file: {source}.", hint="Use a command for it.")


def _copy_one(files: Rooted, source: str, target: str) -> None:
    with (
        naming(source),
        closing(open_regular(files.root, source)) as fd,
        naming(target),
        files.following(target) as new,
    ):
        found = existing(new.parent, new.name)
        if found is not None and not stat_bits.S_ISREG(found.st_mode):
            raise not_regular(target, found.st_mode)
        copy_open_file(fd, new.parent, new.name)


def _copy_directory(files: Rooted, source: str, target: str) -> None:
    with naming(source), closing(files.open(source, LIST)) as old:
        refuse_kernel(old, source)
        with naming(target), files.following(target) as new:
            found = existing(new.parent, new.name)
            if found is None:
                _refuse_inside(old, new, target)
                _appear(old, new, source, preserve=False)
                return
            if not stat_bits.S_ISDIR(found.st_mode):
                raise PathNotDirectory(target)
            with closing(open_child(new.parent, new.name, LIST)) as into:
                copy_tree(old, into, source)


def _refuse_inside(old: int, new: ResolvedPath, target: str) -> None:
    # Only to say it early: a walk never enters what it writes.
    if os.path.samestat(os.fstat(old), os.fstat(new.parent)):
        raise _into_itself(target)


def _copy_whole(old: ResolvedPath, new: ResolvedPath, source: str, *, preserve: bool) -> None:
    mode = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False).st_mode
    if stat_bits.S_ISDIR(mode):
        with closing(open_child(old.parent, old.name, LIST)) as fd:
            refuse_kernel(fd, source)
            _appear(fd, new, source, preserve=preserve)
    elif stat_bits.S_ISLNK(mode):
        copy_link(old.parent, old.name, new.parent, new.name)
    else:
        copy_file(old.parent, old.name, new.parent, new.name, source, preserve=preserve)


def _appear(old: int, new: ResolvedPath, source: str, *, preserve: bool) -> None:
    """Copy a directory beside its place, and put it there whole."""
    temporary = temporary_name(fresh=True)
    os.mkdir(temporary, 0o700, dir_fd=new.parent)
    try:
        with closing(open_child(new.parent, temporary, LIST)) as into:
            copy_tree(old, into, source, preserve=preserve)
        os.rename(temporary, new.name, src_dir_fd=new.parent, dst_dir_fd=new.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(new.parent, temporary, source)
        raise


def _check_replaceable(old: ResolvedPath, new: ResolvedPath, target: str) -> None:
    """Refuse what rename(2) would, before anything is copied."""
    found = existing(new.parent, new.name)
    if found is None:
        return
    moved = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False)
    is_directory = stat_bits.S_ISDIR(found.st_mode)
    if is_directory and not stat_bits.S_ISDIR(moved.st_mode):
        raise PathIsDirectory(target)
    if stat_bits.S_ISDIR(moved.st_mode) and not is_directory:
        raise PathNotDirectory(target)


def _remove(old: ResolvedPath, source: str) -> None:
    found = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False)
    if stat_bits.S_ISDIR(found.st_mode):
        remove_tree(old.parent, old.name, source)
    else:
        os.unlink(old.name, dir_fd=old.parent)


def _into_itself(target: str) -> PathError:
    return PathError(target, f"a directory does not fit into itself: {target}.")


MAX_ENTRIES = 200_000
MAX_SEEN = 2_000_000


def list_files(
    files: Rooted, path: str, *, recursive: bool = False, hidden: bool = False
) -> list[FileInfo]:
    """What is in a directory, sorted by path, symlinks as themselves.

    Without `hidden`, names with a leading dot and what is below them are left out.
    """
    found: list[FileInfo] = []
    with naming(path), closing(files.open(path, LIST)) as top:
        for seen in walk(top, recursive=recursive, lenient=True):
            if not hidden and "/." in f"/{seen.path}":
                continue
            if len(found) == MAX_ENTRIES:
                raise _too_many(path, MAX_ENTRIES)
            where = posixpath.join(path, shown(seen.path))
            found.append(file_info(where, seen.stat, stat_bits.S_ISLNK(seen.stat.st_mode)))
    return sorted(found, key=lambda info: info.path)


def glob(files: Rooted, pattern: str, cwd: str, *, hidden: bool, files_only: bool) -> list[str]:
    """Absolute paths that match, sorted. See `SandboxApi.glob`."""
    seen = 0

    def listing(path: str) -> Iterator[Found]:
        nonlocal seen
        for found in files.listing(path):
            seen += 1
            if seen > MAX_SEEN:
                raise _too_many(pattern, MAX_SEEN)
            yield found

    return glob_paths(pattern, cwd, listing, hidden=hidden, files_only=files_only)


def disk_usage(files: Rooted, path: str) -> DiskUsage:
    """What a file, or a directory with all that is below it, takes of the disk."""
    total = _Total()
    with naming(path), closing(files.open(path, os.O_PATH)) as fd:
        found = os.fstat(fd)
        total.add(found)
        if stat_bits.S_ISDIR(found.st_mode):
            for seen in walk(fd, lenient=True):
                total.add(seen.stat)
    return DiskUsage(bytes=total.bytes, files=total.files, directories=total.directories)


class _Total:
    def __init__(self) -> None:
        self.bytes = self.files = self.directories = 0
        self._linked: set[tuple[int, int]] = set()

    def add(self, found: os.stat_result) -> None:
        is_directory = stat_bits.S_ISDIR(found.st_mode)
        if found.st_nlink > 1 and not is_directory:
            if (found.st_dev, found.st_ino) in self._linked:
                return
            self._linked.add((found.st_dev, found.st_ino))
        self.bytes += found.st_blocks * 512
        self.directories += is_directory
        self.files += not is_directory


def _too_many(what: str, limit: int) -> LimitReached:
    return LimitReached(
        f"{what}: more than {limit} files are not listed at once.",
        hint="List a directory further down, or use a command such as find.",
        limit=limit,
    )
