"""Copying of trees into a layer, with every attribute that overlays show."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import posixpath
import stat
from typing import TYPE_CHECKING

from smokebox.engine.disk import flush_filesystem
from smokebox.engine.files.descriptors import (
    LIST,
    REPLACED,
    SEARCH,
    closing,
    open_beneath,
)
from smokebox.engine.files.replacement import copy_content, write_all
from smokebox.engine.files.trees import remove_tree
from smokebox.engine.images.overlay import make_whiteout, set_opaque
from smokebox.engine.snapshots.tree_index import IndexEntry, entry_of, open_readable
from smokebox.engine.workers import checkpoint, stoppable_threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from smokebox.engine.snapshots.delta import Delta
    from smokebox.engine.snapshots.tree_index import TreeIndex

_FICLONE = 0x40049409
_NO_CLONE = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)
# Attributes of overlayfs itself. It stores those that programs set with this prefix longer.
_OVERLAY, _ESCAPED = "user.overlay.", "user.overlay.overlay."
_KEPT = ("user.", "security.capability", "system.posix_acl_")
_NO_XATTRS = (errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES)
_SMALL = 1 << 20
# Creating files is what takes time, and the kernel does it concurrently in several directories.
_THREADS = 3
# Above this number of files, one flush of the file system is cheaper than one of each.
_FLUSH_EACH = 64
# Errors of a file that a program replaces while it is copied, or whose owner may not read it.
_HOSTILE = (*REPLACED, errno.ENXIO, errno.EACCES, errno.EPERM, errno.EEXIST)

Xattrs = dict[str, bytes]
"""Extended attributes by name."""


class TreeCopier:
    """Fills an empty layer. Files may be copied ahead, and are copied again if they changed.

    Neither side is followed through symlinks.
    """

    def __init__(self, target: str) -> None:
        self._top = os.open(target, LIST | os.O_CLOEXEC)
        self._clones = True
        # None for a file that was copied while it may have changed.
        self._copies: dict[str, IndexEntry | None] = {}
        self._ahead: dict[str, IndexEntry] = {}
        # Files whose copies may be outdated; None before any was copied.
        self._unsure: list[str] | None = None
        # The first copy of each file with several names.
        self._linked: dict[tuple[int, int], str] = {}
        self._directories = {""}
        # Directories of the source, and their extended attributes in that state.
        self._attributes: dict[str, tuple[IndexEntry, Xattrs]] = {}

    def close(self) -> None:
        """Close its directory."""
        os.close(self._top)

    def copy_ahead(
        self, source: int, delta: Delta, index: TreeIndex, unsettled: set[int], settled_ns: int
    ) -> None:
        """Copy files of a tree that changes meanwhile; `copy_rest` finds out which did.

        Those that were copied before and are the same are not copied again.

        Args:
            source: The tree.
            delta: The layer to write, as it is known so far.
            index: The files of the tree, so far.
            unsettled: Inodes that change without a trace.
            settled_ns: A file that was last changed before this time is known by that time.
        """
        self._drop_outdated(delta)
        self._ahead.clear()
        self.make_directories(delta.directories)
        missing = {path: one for path, one in delta.files.items() if path not in self._copies}
        # A file with several names is copied once, and then linked: by one thread.
        linked = [path for path, entry in missing.items() if entry.links > 1]
        single = [path for path, entry in missing.items() if entry.links == 1]
        folders = [*_by_folder(single)]
        with stoppable_threads(_THREADS) as run:
            for number in range(_THREADS):
                run(self._copy_folders, source, delta.files, folders[number::_THREADS])
        self._copy_folders(source, delta.files, _by_folder(linked))
        settled = {
            path: index[path] for path in delta.directories if index[path].ctime_ns < settled_ns
        }
        with _tolerant(*_HOSTILE):
            self._read_directories(source, settled)
        for path, after in self._ahead.items():
            known = after.ctime_ns < settled_ns and after.inode not in unsettled
            if known and after.same(delta.files[path]):
                self._copies[path] = delta.files[path]
        self._unsure = [path for path in delta.files if self._copies.get(path) is None]

    def _copy_folders(
        self,
        source: int,
        files: Mapping[str, IndexEntry],
        folders: Iterable[tuple[str, list[str]]],
    ) -> None:
        for folder, names in folders:
            with _tolerant(*_HOSTILE), self._folders(source, folder) as (fd, to):
                for name in names:
                    path = posixpath.join(folder, name)
                    with _tolerant(*_HOSTILE):
                        self._ahead[path] = self._copy(source, fd, to, name, path, files[path])

    def copy_rest(self, source: int, delta: Delta, index: TreeIndex) -> None:
        """Copy what is missing from a tree that does not change; `finish` needs it no more."""
        self._drop_outdated(delta)
        self.make_directories(delta.directories)
        self.copy_files(source, delta.files)
        self._read_directories(source, {path: index[path] for path in delta.directories})

    def copy_late(self, source: int, delta: Delta, late: Delta, index: TreeIndex) -> None:
        """Copy what is missing from a tree that does not change; `take_over` checks the rest.

        Args:
            source: The tree.
            delta: The layer to write, as it was known before.
            late: What changed since.
            index: The files of the tree.
        """
        unsure = delta.files if self._unsure is None else self._unsure
        files = {path: index[path] for path in unsure if path in index} | late.files
        files = {path: one for path, one in files.items() if not one.is_directory}
        for path in (*files, *late.hidden):
            self._drop(path)
        for path, hides in late.directories.items():
            # A directory in the place of a file, or of another directory.
            if path and (hides or path in self._copies):
                self._drop(path)
        self._linked = {key: path for key, path in self._linked.items() if path in self._copies}
        wanted = (*delta.directories, *late.directories)
        known = {path: index[path] for path in wanted if path in index}
        directories = {path: one for path, one in known.items() if one.is_directory}
        self.make_directories(directories)
        self.copy_files(source, files)
        self._read_directories(source, directories)

    def take_over(self, delta: Delta, index: TreeIndex) -> bool:
        """Keep what belongs to a layer; return False if something of it is missing."""
        self._drop_outdated(delta)
        self.make_directories(delta.directories)
        if any(path not in self._copies for path in delta.files):
            return False
        return all(
            path in self._attributes and self._attributes[path][0].same(index[path])
            for path in delta.directories
        )

    def _drop(self, path: str) -> None:
        """Remove what was copied to a path."""
        name, below = posixpath.basename(path), f"{path}/"
        if path in self._directories:
            self._directories -= {
                one for one in self._directories if one == path or one.startswith(below)
            }
            for one in [one for one in self._copies if one.startswith(below)]:
                del self._copies[one]
            with _tolerant(errno.ENOENT), self._parent(path) as folder:
                remove_tree(folder, name, path)
        elif path in self._copies:
            del self._copies[path]
            with _tolerant(*REPLACED), self._parent(path) as folder:
                os.unlink(name, dir_fd=folder)

    def finish(self, delta: Delta, index: TreeIndex) -> None:
        """Complete the layer from what is known of the tree."""
        for path in delta.hidden:
            self._hide(path)
        for path in reversed(delta.directories):
            xattrs = self._attributes[path][1]
            self._set_directory(path, index[path], xattrs, opaque=delta.directories[path])

    def _read_directories(self, source: int, directories: TreeIndex) -> None:
        for path, entry in directories.items():
            known = self._attributes.get(path)
            if known is None or not known[0].same(entry):
                xattrs: Xattrs = {}
                with _tolerant(errno.ENOENT), closing(open_beneath(source, path, SEARCH)) as fd:
                    xattrs = _read_xattrs(f"/proc/self/fd/{fd}")
                self._attributes[path] = (entry, xattrs)

    def make_directories(self, paths: Iterable[str]) -> None:
        """Create directories, parents first. Their attributes follow in `copy_directories`."""
        for path in paths:
            if path not in self._directories:
                with self._parent(path) as folder:
                    os.mkdir(posixpath.basename(path), 0o700, dir_fd=folder)
                self._directories.add(path)

    def copy_files(self, source: int, files: Mapping[str, IndexEntry]) -> None:
        """Copy the files that are missing into directories that exist."""
        missing = [path for path in files if path not in self._copies]
        for folder, names in _by_folder(missing):
            with _tolerant(errno.ENOENT), self._folders(source, folder) as (fd, to):
                for name in names:
                    path = posixpath.join(folder, name)
                    # The engine may remove one at any time.
                    with _tolerant(errno.ENOENT):
                        self._copy(source, fd, to, name, path, files[path])
                        self._copies[path] = files[path]

    def copy_directory(self, source: int, path: str, entry: IndexEntry, *, opaque: bool) -> None:
        """Set the attributes of a directory that is complete, after those in it."""
        self._read_directories(source, {path: entry})
        self._set_directory(path, entry, self._attributes[path][1], opaque=opaque)

    def _set_directory(self, path: str, entry: IndexEntry, xattrs: Xattrs, *, opaque: bool) -> None:
        with closing(open_beneath(self._top, path, LIST)) as to:
            for name, value in xattrs.items():
                os.setxattr(to, name, value)
            if opaque:
                set_opaque(to)
            _copy_attributes(entry, to)

    def flush(self) -> None:
        """Write everything to the disk."""
        try:
            if len(self._copies) + len(self._directories) <= _FLUSH_EACH:
                self._flush_each()
                return
        except PermissionError:
            # A directory is closed to its owner.
            pass
        flush_filesystem(self._top)

    def _flush_each(self) -> None:
        for path, entry in self._copies.items():
            if entry is not None and stat.S_ISREG(entry.mode):
                with (
                    self._parent(path) as folder,
                    closing(open_readable(folder, posixpath.basename(path))) as fd,
                ):
                    os.fsync(fd)
        for path in sorted(self._directories, reverse=True):
            with closing(open_beneath(self._top, path, LIST)) as fd:
                os.fsync(fd)

    def _drop_outdated(self, delta: Delta) -> None:
        """Remove what was copied ahead and has changed, or is gone."""
        for path in sorted(self._directories - delta.directories.keys() - {""}, reverse=True):
            self._directories.discard(path)
            with _tolerant(errno.ENOENT), self._parent(path) as folder:
                remove_tree(folder, posixpath.basename(path), path)
        for path, entry in list(self._copies.items()):
            wanted = delta.files.get(path)
            if entry is None or wanted is None or not wanted.same(entry):
                del self._copies[path]
                with _tolerant(*REPLACED), self._parent(path) as folder:
                    os.unlink(posixpath.basename(path), dir_fd=folder)
        self._linked = {key: path for key, path in self._linked.items() if path in self._copies}

    def _hide(self, path: str) -> None:
        with self._parent(path) as folder:
            make_whiteout(folder, posixpath.basename(path))

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[int]:
        with closing(open_beneath(self._top, posixpath.dirname(path), SEARCH)) as folder:
            yield folder

    @contextlib.contextmanager
    def _folders(self, source: int, folder: str) -> Iterator[tuple[int, int]]:
        with (
            closing(open_beneath(source, folder, SEARCH)) as fd,
            closing(open_beneath(self._top, folder, SEARCH)) as to,
        ):
            yield fd, to

    def _copy(
        self, source: int, fd: int, to: int, name: str, path: str, entry: IndexEntry
    ) -> IndexEntry:
        """Copy one file, and return its state after that."""
        checkpoint()
        # First, so that `finish` removes what is there if this fails halfway.
        self._copies[path] = None
        if entry.is_whiteout:
            make_whiteout(to, name)
            return entry
        key = (source, entry.inode)
        first = self._linked.get(key) if entry.links > 1 else None
        if first is not None:
            with self._parent(first) as folder:
                os.link(
                    posixpath.basename(first),
                    name,
                    src_dir_fd=folder,
                    dst_dir_fd=to,
                    follow_symlinks=False,
                )
            return entry_of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        after = self._copy_first(fd, to, name, entry)
        if entry.links > 1:
            self._linked[key] = path
        return after

    def _copy_first(self, fd: int, to: int, name: str, entry: IndexEntry) -> IndexEntry:
        if stat.S_ISREG(entry.mode):
            return self._copy_regular(fd, to, name)
        if stat.S_ISLNK(entry.mode):
            os.symlink(os.readlink(name, dir_fd=fd), name, dir_fd=to)
        elif stat.S_ISFIFO(entry.mode) or stat.S_ISSOCK(entry.mode):
            os.mknod(name, entry.mode, 0, dir_fd=to)
        else:
            # No program of a sandbox can make a device.
            return entry
        after = entry_of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        if os.geteuid() == 0:
            os.chown(name, after.uid, after.gid, dir_fd=to, follow_symlinks=False)
        if not stat.S_ISLNK(entry.mode):
            os.chmod(name, stat.S_IMODE(after.mode), dir_fd=to)
        times = (after.atime_ns, after.mtime_ns)
        os.utime(name, ns=times, dir_fd=to, follow_symlinks=False)
        return after

    def _copy_regular(self, fd: int, to: int, name: str) -> IndexEntry:
        with closing(open_readable(fd, name)) as file:
            before = os.fstat(file)
            if not stat.S_ISREG(before.st_mode):
                raise OSError(errno.ENOTDIR, "it was replaced", name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with closing(os.open(name, flags, 0o600, dir_fd=to)) as out:
                self._copy_data(file, out, before)
                after = entry_of(os.fstat(file))
                # A change of owner drops capabilities, so that comes first.
                _copy_owner(after, out)
                _copy_xattrs(file, out)
                _copy_mode_and_times(after, out)
        return after

    def _copy_data(self, source: int, target: int, found: os.stat_result) -> None:
        if found.st_size and self._clones:
            try:
                fcntl.ioctl(target, _FICLONE, source)
                return
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self._clones = False
        if found.st_size <= _SMALL and found.st_blocks * 512 >= found.st_size:
            # Without holes, this takes a third of the calls.
            left = found.st_size
            while left > 0 and (data := os.read(source, _SMALL)):
                write_all(target, data)
                left -= len(data)
        else:
            copy_content(source, target)


def copy_top(source: str, target: str) -> None:
    """Give a directory the attributes of another."""
    with (
        closing(os.open(source, LIST | os.O_CLOEXEC)) as fd,
        closing(os.open(target, LIST | os.O_CLOEXEC)) as to,
    ):
        _copy_xattrs(fd, to)
        _copy_attributes(entry_of(os.fstat(fd)), to)


def _by_folder(files: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    folders: dict[str, list[str]] = {}
    for path in files:
        folder, name = posixpath.split(path)
        folders.setdefault(folder, []).append(name)
    yield from folders.items()


@contextlib.contextmanager
def _tolerant(*numbers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def _read_xattrs(source: int | str) -> Xattrs:
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno not in _NO_XATTRS:
            raise
        return {}
    found: Xattrs = {}
    for name in names:
        if name.startswith(_OVERLAY) and not name.startswith(_ESCAPED):
            continue
        if name.startswith(_KEPT):
            with _tolerant(errno.ENODATA):
                found[name] = os.getxattr(source, name)
    return found


def _copy_xattrs(source: int, target: int) -> None:
    for name, value in _read_xattrs(source).items():
        os.setxattr(target, name, value)


def _copy_attributes(entry: IndexEntry, target: int) -> None:
    _copy_owner(entry, target)
    _copy_mode_and_times(entry, target)


def _copy_owner(entry: IndexEntry, target: int) -> None:
    # The target was just made by this user, and an ordinary one owns every file of its sandboxes.
    if os.geteuid() == 0 and (entry.uid or entry.gid):
        os.fchown(target, entry.uid, entry.gid)


def _copy_mode_and_times(entry: IndexEntry, target: int) -> None:
    os.fchmod(target, stat.S_IMODE(entry.mode))
    os.utime(target, ns=(entry.atime_ns, entry.mtime_ns))
