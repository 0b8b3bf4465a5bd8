"""Moving, copying, listing and measuring files of one root."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat as stat_bits
from typing import TYPE_CHECKING

from smokebox.engine.disk import UsageCounter
from smokebox.engine.files.descriptors import (
    LIST,
    closing,
    not_regular,
    open_child,
    open_regular,
    path_errors,
    refuse_kernel_file,
)
from smokebox.engine.files.replacement import rename_in, temporary_name
from smokebox.engine.files.rooted_files import ResolvedPath, file_info, refuse_mount
from smokebox.engine.files.trees import (
    copy_file,
    copy_link,
    copy_open_file,
    copy_tree,
    lstat,
    remove_tree,
    walk,
)
from smokebox.errors import LimitReached, PathError, PathIsDirectory, PathNotDirectory, PathNotFound
from smokebox.sandbox.glob import glob_paths
from smokebox.sandbox.local_files import display_name
from smokebox.types import DiskUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.sandbox.glob import GlobEntry
    from smokebox.types import FileInfo

MAX_LISTED = 200_000
MAX_VISITED = 2_000_000


def rename(files: RootedFiles, source: str, target: str) -> None:
    """Move a file or directory, replacing a file or an empty directory at the target.

    Between filesystems, and for a directory of the image, it is copied and then removed.
    """
    with path_errors(source), files.locate(source) as old:
        found = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False)
        refuse_mount(old, found, source)
        with path_errors(target), files.locate(target) as new:
            try:
                os.rename(old.name, new.name, src_dir_fd=old.parent, dst_dir_fd=new.parent)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    raise _into_itself(target) from error
                if error.errno != errno.EXDEV:
                    raise
                _check_replaceable(found, new, target)
                _copy_and_remove(old, new, source)


def relocate(source: int, name: str, target: int, path: str) -> None:
    """Move a name of an open directory to another directory, where that name is free.

    A directory of the image is copied and then removed. `path` is for errors.
    """
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_and_remove(ResolvedPath(source, name), ResolvedPath(target, name), path)


def move(files: RootedFiles, source: str, target: str) -> str:
    """Like `rename`, but into the target if that is a directory. Returns the final path."""
    with contextlib.suppress(PathNotFound):
        if files.info(target).is_directory:
            target = posixpath.join(target, posixpath.basename(source))
    rename(files, source, target)
    return target


def copy(files: RootedFiles, source: str, target: str, *, recursive: bool = False) -> None:
    """Copy a file, or with `recursive` a directory, with modes; symlinks in it stay symlinks.

    A missing target appears as a whole. A directory is merged into an existing one.
    """
    info = files.info(source)
    if info.is_directory:
        if not recursive:
            raise PathIsDirectory(source, hint="Pass recursive=True to copy it.")
        if f"{target}/".startswith(f"{source.rstrip('/')}/"):
            raise _into_itself(target)
        _copy_directory(files, source, target)
    elif info.is_file:
        _copy_file(files, source, target)
    else:
        raise PathError(source, f"not a regular file: {source}.", hint="Use a command for it.")


def _copy_file(files: RootedFiles, source: str, target: str) -> None:
    with (
        path_errors(source),
        closing(open_regular(files.root, source)) as fd,
        path_errors(target),
        files.locate_target(target) as new,
    ):
        found = lstat(new.parent, new.name)
        if found is not None and not stat_bits.S_ISREG(found.st_mode):
            raise not_regular(target, found.st_mode)
        copy_open_file(fd, new.parent, new.name)


def _copy_directory(files: RootedFiles, source: str, target: str) -> None:
    with path_errors(source), closing(files.open(source, LIST)) as old:
        refuse_kernel_file(old, source)
        with path_errors(target), files.locate_target(target) as new:
            found = lstat(new.parent, new.name)
            if found is None:
                # Only an early error: a walk never enters the directory that it writes.
                if os.path.samestat(os.fstat(old), os.fstat(new.parent)):
                    raise _into_itself(target)
                _copy_atomically(old, new, source, preserve=False)
                return
            if not stat_bits.S_ISDIR(found.st_mode):
                raise PathNotDirectory(target)
            with closing(open_child(new.parent, new.name, LIST)) as existing:
                copy_tree(old, existing, source)


def _copy_and_remove(old: ResolvedPath, new: ResolvedPath, source: str) -> None:
    mode = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False).st_mode
    if stat_bits.S_ISDIR(mode):
        with closing(open_child(old.parent, old.name, LIST)) as fd:
            refuse_kernel_file(fd, source)
            _copy_atomically(fd, new, source, preserve=True)
        remove_tree(old.parent, old.name, source)
        return
    if stat_bits.S_ISLNK(mode):
        copy_link(old.parent, old.name, new.parent, new.name)
    else:
        copy_file(old.parent, old.name, new.parent, new.name, source, preserve=True)
    os.unlink(old.name, dir_fd=old.parent)


def _copy_atomically(old: int, new: ResolvedPath, source: str, *, preserve: bool) -> None:
    """Copy a directory under a temporary name, then rename it."""
    temporary = temporary_name(fresh=True)
    os.mkdir(temporary, 0o700, dir_fd=new.parent)
    try:
        with closing(open_child(new.parent, temporary, LIST)) as fd:
            copy_tree(old, fd, source, preserve=preserve)
        rename_in(new.parent, temporary, new.name)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(new.parent, temporary, source)
        raise


def _check_replaceable(moved: os.stat_result, new: ResolvedPath, target: str) -> None:
    """Raise like rename(2), before anything is copied."""
    found = lstat(new.parent, new.name)
    if found is None:
        return
    is_directory = stat_bits.S_ISDIR(found.st_mode)
    if is_directory and not stat_bits.S_ISDIR(moved.st_mode):
        raise PathIsDirectory(target)
    if stat_bits.S_ISDIR(moved.st_mode) and not is_directory:
        raise PathNotDirectory(target)


def _into_itself(target: str) -> PathError:
    return PathError(target, f"a directory cannot be moved or copied into itself: {target}.")


def list_files(
    files: RootedFiles, path: str, *, recursive: bool = False, hidden: bool = False
) -> list[FileInfo]:
    """Return the entries of a directory sorted by path, without following symlinks.

    Without `hidden`, names with a leading dot and everything below them are omitted.
    """
    listed: list[FileInfo] = []
    with path_errors(path), closing(files.open(path, LIST)) as top:
        for entry in walk(top, recursive=recursive, lenient=True):
            if not hidden and "/." in f"/{entry.path}":
                continue
            if len(listed) == MAX_LISTED:
                raise _too_many(path, MAX_LISTED)
            absolute = posixpath.join(path, display_name(entry.path))
            listed.append(file_info(absolute, entry.stat, stat_bits.S_ISLNK(entry.stat.st_mode)))
    return sorted(listed, key=lambda info: info.path)


def glob(
    files: RootedFiles, pattern: str, cwd: str, *, hidden: bool, files_only: bool
) -> list[str]:
    """Return the sorted absolute paths that match. See `SandboxApi.glob`."""
    visited = 0

    def listing(path: str) -> Iterator[GlobEntry]:
        nonlocal visited
        for found in files.listing(path):
            visited += 1
            if visited > MAX_VISITED:
                raise _too_many(pattern, MAX_VISITED)
            yield found

    return glob_paths(pattern, cwd, listing, hidden=hidden, files_only=files_only)


def disk_usage(files: RootedFiles, path: str) -> DiskUsage:
    """Measure a file, or a directory with everything below it."""
    counter = UsageCounter()
    with path_errors(path), closing(files.open(path, os.O_PATH)) as fd:
        found = os.fstat(fd)
        counter.add(found)
        if stat_bits.S_ISDIR(found.st_mode):
            for entry in walk(fd, lenient=True):
                counter.add(entry.stat)
    return DiskUsage(bytes=counter.bytes, files=counter.files, directories=counter.directories)


def _too_many(what: str, limit: int) -> LimitReached:
    return LimitReached(
        f"{what}: more than {limit} files are not listed at once.",
        hint="List a directory further down, or use a command such as find.",
        limit=limit,
    )
