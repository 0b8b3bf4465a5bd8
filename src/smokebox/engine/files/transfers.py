"""Files and directories that move or are copied to another place of the same root."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat as stat_bits
from typing import TYPE_CHECKING

from smokebox.engine.files.opening import (
    LIST,
    closing,
    naming,
    not_regular,
    open_child,
    open_regular,
    refuse_kernel,
)
from smokebox.engine.files.places import Place, refuse_mount
from smokebox.engine.files.replacing import temporary_name
from smokebox.engine.files.trees import (
    copy_file,
    copy_link,
    copy_open_file,
    copy_tree,
    existing,
    remove_tree,
)
from smokebox.errors import PathError, PathIsDirectory, PathNotDirectory, PathNotFound

if TYPE_CHECKING:
    from smokebox.engine.files.rooted import Rooted


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
        old, new = Place(source, name, []), Place(target, other, [])
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


def _refuse_inside(old: int, new: Place, target: str) -> None:
    # Only to say it early: a walk never enters what it writes.
    if os.path.samestat(os.fstat(old), os.fstat(new.parent)):
        raise _into_itself(target)


def _copy_whole(old: Place, new: Place, source: str, *, preserve: bool) -> None:
    mode = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False).st_mode
    if stat_bits.S_ISDIR(mode):
        with closing(open_child(old.parent, old.name, LIST)) as fd:
            refuse_kernel(fd, source)
            _appear(fd, new, source, preserve=preserve)
    elif stat_bits.S_ISLNK(mode):
        copy_link(old.parent, old.name, new.parent, new.name)
    else:
        copy_file(old.parent, old.name, new.parent, new.name, source, preserve=preserve)


def _appear(old: int, new: Place, source: str, *, preserve: bool) -> None:
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


def _check_replaceable(old: Place, new: Place, target: str) -> None:
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


def _remove(old: Place, source: str) -> None:
    found = os.stat(old.name, dir_fd=old.parent, follow_symlinks=False)
    if stat_bits.S_ISDIR(found.st_mode):
        remove_tree(old.parent, old.name, source)
    else:
        os.unlink(old.name, dir_fd=old.parent)


def _into_itself(target: str) -> PathError:
    return PathError(target, f"a directory does not fit into itself: {target}.")
