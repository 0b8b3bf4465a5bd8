"""Copies trees into the root of a sandbox, with the results of BuildKit's COPY.

Everything is reached from the descriptor of the root, as the image controls its symlinks. A
destination that does not exist is made with mode 0755, and belongs to the owner of `--chown`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat as stat_bits
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from e2b_dockerfile_utils import PatternMatcher

from smokebox.engine.files.descriptors import SEARCH, closing, open_child
from smokebox.engine.files.replacement import (
    NewFile,
    Replacement,
    rename_in,
    temporary_name,
    write_all,
)
from smokebox.engine.files.trees import lstat, remove_tree
from smokebox.engine.images.build.sources import expand, follow
from smokebox.engine.workers import checkpoint
from smokebox.errors import PathNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.images.build.sources import Source, SourceEntry

DIRECTORY_MODE = 0o755
_CHUNK = 1 << 20
_MAX_LINKS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """A user and a group inside a sandbox."""

    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of one COPY. `owner` and `mode` override those of the source.

    `keep_owner` keeps the ids of the source where there is no `owner`. `take` is called with the
    size of each file before it is written, and raises if there is no room.
    """

    owner: Ids | None = None
    mode: int | None = None
    keep_owner: bool = False
    parents: bool = False
    excludes: tuple[str, ...] = ()
    take: Callable[[int], None] = field(default=lambda size: None)


class Copier:
    """Copies into the root of a sandbox. Blocking; run it as root of the sandbox."""

    def __init__(self, files: RootedFiles, options: CopyOptions) -> None:
        self._files = files
        self._options = options
        self._excluded = (
            PatternMatcher(list(options.excludes)).matches
            if options.excludes
            else lambda path: False
        )

    def copy(self, source: Source, sources: Sequence[str], destination: str) -> None:
        """Copy sources to an absolute destination; a trailing slash makes it a directory.

        Raises:
            PathNotFound: A source without wildcards does not exist.
        """
        found = [path for pattern in sources for path in expand(source, pattern)]
        if len(found) > 1 and not destination.endswith("/"):
            destination += "/"
        for path in found:
            checkpoint()
            place = follow(source, path.replace("/./", "/"))
            entry = None if place is None else source.entry(place)
            if place is None or entry is None:
                raise PathNotFound(
                    path,
                    f"the source {path or '/'!r} does not exist",
                    hint="Check the path, and that .dockerignore does not exclude it.",
                )
            self._copy_one(source, entry, path, destination)

    def write(self, destination: str, name: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file to a destination, or into it under `name` if it is a directory."""
        with self._target(destination, name) as (parent, target):
            self._put_bytes(parent, target, data, mode)

    def make_directory(self, path: str, owner: Ids) -> bool:
        """Create a directory and its parents for an owner. Returns False if it existed."""
        created: list[str] = []
        os.close(self._directory(path, owner, created))
        return bool(created)

    def _copy_one(self, source: Source, entry: SourceEntry, path: str, destination: str) -> None:
        kept = _kept_parents(path) if self._options.parents else ""
        if kept:
            destination = posixpath.join(destination, kept) + "/"
        if not entry.is_directory:
            name = posixpath.basename(path)
            if not self._excluded(name):
                with self._target(destination, name) as (parent, target):
                    self._put(source, entry, parent, target)
            return
        if self._options.parents:
            destination = posixpath.join(destination, posixpath.basename(path))
        top = self._directory(destination, self._options.owner or Ids(), [])
        with closing(top):
            self._copy_tree(source, entry, top)

    def _copy_tree(self, source: Source, top: SourceEntry, target: int) -> None:
        """Copy the entries of a directory into an open one. Existing directories are merged."""
        prefix = f"{top.path}/" if top.path else ""
        open_directories: list[tuple[str, int]] = [("", os.dup(target))]
        finished: list[tuple[int, SourceEntry]] = []
        try:
            for entry in source.walk(top.path):
                checkpoint()
                relative = entry.path[len(prefix) :]
                if self._excluded(relative) and not entry.is_directory:
                    continue
                folder, name = posixpath.split(relative)
                while open_directories[-1][0] != folder and len(open_directories) > 1:
                    os.close(open_directories.pop()[1])
                parent = self._below(target, open_directories, folder)
                if not entry.is_directory:
                    self._put(source, entry, parent, name)
                elif not self._excluded(relative):
                    fd = self._enter(parent, name)
                    self._set_metadata(fd, entry, entry.mode)
                    open_directories.append((relative, fd))
                    finished.append((os.dup(fd), entry))
                    if len(finished) > 256:
                        self._set_times(finished)
        finally:
            for _, fd in open_directories:
                os.close(fd)
            self._set_times(finished)

    def _below(self, top: int, opened: list[tuple[str, int]], folder: str) -> int:
        """Return an open directory of the copy, made if its source was excluded."""
        if opened[-1][0] == folder:
            return opened[-1][1]
        fd, done = os.dup(top), ""
        for name in folder.split("/"):
            below = self._enter(fd, name)
            os.close(fd)
            fd, done = below, posixpath.join(done, name)
        opened.append((folder, fd))
        return fd

    def _enter(self, parent: int, name: str) -> int:
        """Open a directory, made in place of anything else of this name."""
        found = lstat(parent, name)
        if found is not None and not stat_bits.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=parent)
            found = None
        if found is None:
            os.mkdir(name, DIRECTORY_MODE, dir_fd=parent)
        return open_child(parent, name, os.O_RDONLY | os.O_DIRECTORY)

    def _set_times(self, finished: list[tuple[int, SourceEntry]]) -> None:
        while finished:
            fd, entry = finished.pop()
            with contextlib.suppress(OSError):
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            os.close(fd)

    def _put(self, source: Source, entry: SourceEntry, parent: int, name: str) -> None:
        self._clear(parent, name)
        if entry.is_link:
            self._put_link(entry, parent, name)
        elif entry.is_file:
            self._options.take(entry.size)
            before = lstat(parent, name)
            # A layer of a copy that fails is dropped as a whole.
            kind = NewFile if before is None else Replacement
            with (
                closing(source.open(entry)) as content,
                kind(parent, name, before) as file,
            ):
                while chunk := os.read(content, _CHUNK):
                    write_all(file.fd, chunk)
                self._finish(file, entry.mode, entry)
                os.utime(file.fd, ns=(entry.mtime_ns, entry.mtime_ns))
        elif stat_bits.S_ISFIFO(entry.type):
            with contextlib.suppress(FileExistsError):
                os.mkfifo(name, entry.mode, dir_fd=parent)

    def _put_bytes(self, parent: int, name: str, data: bytes, mode: int) -> None:
        self._clear(parent, name)
        self._options.take(len(data))
        with Replacement(parent, name, lstat(parent, name)) as file:
            file.write(data)
            self._finish(file, mode, None)

    def _finish(self, file: Replacement, mode: int, entry: SourceEntry | None) -> None:
        file.like = None
        file.mode = mode if self._options.mode is None else self._options.mode
        ids = self._ids(entry)
        if ids is not None:
            os.fchown(file.fd, *ids)

    def _put_link(self, entry: SourceEntry, parent: int, name: str) -> None:
        temporary = temporary_name(fresh=True)
        os.symlink(entry.target, temporary, dir_fd=parent)
        try:
            ids = self._ids(entry)
            if ids is not None:
                os.chown(temporary, *ids, dir_fd=parent, follow_symlinks=False)
            times = (entry.mtime_ns, entry.mtime_ns)
            os.utime(temporary, ns=times, dir_fd=parent, follow_symlinks=False)
            rename_in(parent, temporary, name)
        except BaseException:
            os.unlink(temporary, dir_fd=parent)
            raise

    def _clear(self, parent: int, name: str) -> None:
        """Remove a directory in the place of a file."""
        found = lstat(parent, name)
        if found is not None and stat_bits.S_ISDIR(found.st_mode):
            remove_tree(parent, name, name)

    def _set_metadata(self, fd: int, entry: SourceEntry, mode: int) -> None:
        ids = self._ids(entry)
        if ids is not None:
            os.fchown(fd, *ids)
        os.fchmod(fd, mode if self._options.mode is None else self._options.mode)

    def _ids(self, entry: SourceEntry | None) -> tuple[int, int] | None:
        """Return the ids on the host for a copied entry; None where there is one id only."""
        owner = self._files.owner
        if owner.count == 1:
            return None
        ids = self._options.owner
        if ids is None and entry is not None and self._options.keep_owner:
            ids = Ids(uid=entry.uid, gid=entry.gid)
        ids = ids or Ids()
        return owner.uid + ids.uid, owner.gid + ids.gid

    @contextlib.contextmanager
    def _target(self, destination: str, name: str) -> Iterator[tuple[int, str]]:
        """Open the directory that a file goes to, and yield it with the name of the file."""
        owner = self._options.owner or Ids()
        if destination.endswith("/") or self._is_directory(destination):
            parent = self._directory(destination, owner, [])
        else:
            place = self._follow_file(destination)
            folder, name = posixpath.split(place)
            parent = self._directory(folder, owner, [])
        with closing(parent):
            yield parent, name

    def _is_directory(self, path: str) -> bool:
        try:
            with closing(self._files.open(path, os.O_PATH)) as fd:
                return stat_bits.S_ISDIR(os.fstat(fd).st_mode)
        except OSError:
            return False

    def _follow_file(self, path: str) -> str:
        """Return the path that a symlink at the end of a path leads to."""
        for _ in range(_MAX_LINKS):
            folder, name = posixpath.split(path)
            try:
                with closing(self._files.open(folder or "/", SEARCH)) as parent:
                    target = os.readlink(name, dir_fd=parent)
            except OSError:
                return path
            path = posixpath.join(folder, target)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def _directory(self, path: str, owner: Ids, created: list[str]) -> int:
        """Open a directory, creating what is missing of its path for an owner."""
        path = posixpath.normpath(f"/{path}")
        if path == "//":
            path = "/"
        try:
            return self._files.open(path, SEARCH)
        except FileNotFoundError:
            pass
        folder, name = posixpath.split(path)
        # A dangling symlink is followed: its target is created.
        with closing(self._directory(folder, owner, created)) as parent:
            with contextlib.suppress(OSError):
                target = os.readlink(name, dir_fd=parent)
                return self._directory(posixpath.join(folder, target), owner, created)
            os.mkdir(name, DIRECTORY_MODE, dir_fd=parent)
            created.append(path)
            if self._files.owner.count > 1:
                host = self._files.owner
                ids = (host.uid + owner.uid, host.gid + owner.gid)
                os.chown(name, *ids, dir_fd=parent, follow_symlinks=False)
            return open_child(parent, name, SEARCH)


def _kept_parents(path: str) -> str:
    """Return the parents that `--parents` keeps: those after `/./`, or all."""
    _, pivot, rest = path.partition("/./")
    return posixpath.dirname(rest if pivot else path)
