"""Changes below a directory of a sandbox, read from inotify with blocking calls.

A directory that appears is first watched and then listed, so that nothing in it is missed. A
change that both report is yielded once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import stat as stat_bits
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from smokebox.engine import inotify
from smokebox.engine.files.descriptors import (
    LIST,
    SEARCH,
    closing,
    is_kernel_file,
    open_beneath,
    path_errors,
)
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.files.replacement import TEMPORARY
from smokebox.engine.inotify import Inotify
from smokebox.engine.workers import checkpoint
from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.inotify import InotifyEvent
    from smokebox.types import ChangeKind


MAX_DIRECTORIES = 20_000
MAX_CHANGES = 4_096

_MASK = (
    inotify.MODIFY
    | inotify.ATTRIB
    | inotify.MOVED_FROM
    | inotify.MOVED_TO
    | inotify.CREATE
    | inotify.DELETE
    | inotify.DELETE_SELF
    | inotify.MOVE_SELF
    | inotify.ONLYDIR
    | inotify.EXCL_UNLINK
)
_KINDS: dict[int, ChangeKind] = {
    inotify.CREATE: "create",
    inotify.MODIFY: "modify",
    inotify.DELETE: "delete",
    inotify.MOVED_FROM: "move_from",
    inotify.MOVED_TO: "move_to",
    inotify.ATTRIB: "attrib",
}
_ENDS = inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.UNMOUNT
_MAX_READS = 64
# The kernel's name for a file opened with O_TMPFILE.
_UNNAMED = re.compile(r"#\d+")


@dataclass(frozen=True, slots=True)
class FileChange:
    """One change of a path. The kind `resync` means that some may have been missed."""

    kind: ChangeKind
    path: str
    is_directory: bool = False


class WatchOptions(NamedTuple):
    """Path and filters of a watch."""

    path: str
    recursive: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]


class Observer:
    """Watches a directory, or a file through its parent.

    `count` returns the number of directories that all watches of the sandbox have together: the
    kernel's limit is shared by all sandboxes of a host.
    """

    def __init__(self, options: WatchOptions, count: Callable[[], int]) -> None:
        self._path = options.path
        self._recursive = options.recursive
        self._include = Patterns("include", options.include)
        self._exclude = Patterns("exclude", options.exclude)
        self._file_name = ""
        self._paths: dict[int, str] = {}
        # Names that a listing reported, until the kernel's event for them is read.
        self._listed: set[tuple[int, str]] = set()
        # By cookie of a move: directories that left, and temporary files that get a final name.
        self._moved_out: dict[int, str] = {}
        self._replacing: dict[int, ChangeKind] = {}
        self._changes: list[FileChange] = []
        self._count = count
        self.ended = False

    @property
    def directories(self) -> int:
        """Number of watched directories."""
        return len(self._paths)

    def run(self, files: RootedFiles) -> Generator[list[FileChange], None, None]:
        """Start to watch, then yield the changes since the last call each time."""
        with path_errors(self._path), contextlib.closing(Inotify()) as self._inotify:
            self.fileno = self._inotify.fd
            self._files = files
            self._find_top()
            self._watch_tree("", report=False)
            yield []
            while not self.ended:
                yield self._read_changes()

    def _find_top(self) -> None:
        with closing(self._files.open(self._path, os.O_PATH)) as fd:
            found = os.fstat(fd)
        if not stat_bits.S_ISDIR(found.st_mode):
            self._path, self._file_name = posixpath.split(self._path)
            self._recursive = False
        # Fails here, not silently later, for a directory that may not be listed.
        with closing(self._files.open(self._path, LIST)) as fd:
            self._stat = os.fstat(fd)

    def _open_top(self) -> int:
        # Not held open in between: DELETE_SELF comes only after the last descriptor is closed.
        fd = self._files.open(self._path, SEARCH)
        if not os.path.samestat(os.fstat(fd), self._stat):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return fd

    def _read_changes(self) -> list[FileChange]:
        for _ in range(_MAX_READS):
            checkpoint()
            events = self._inotify.read()
            for event in events:
                self._handle(event)
            if not events:
                # All events from before the last listing are read: later ones are new.
                self._listed.clear()
                self._replacing.clear()
                while self._moved_out:
                    self._unwatch_tree(self._moved_out.popitem()[1])
                break
        changes, self._changes = self._changes, []
        return changes

    def _handle(self, event: InotifyEvent) -> None:
        if event.mask & inotify.OVERFLOW:
            self._start_over()
            return
        folder = self._paths.get(event.watch)
        if event.mask & inotify.IGNORED:
            self._paths.pop(event.watch, None)
        if folder is None:
            return
        temporary = TEMPORARY.fullmatch(event.name)
        if not event.name:
            self._handle_self(event, folder)
        elif not self._file_name or event.name == self._file_name or temporary:
            path = f"{folder}/{event.name}" if folder else event.name
            if not self._exclude.cover(path):
                self._handle_entry(event, path, temporary)

    def _handle_self(self, event: InotifyEvent, folder: str) -> None:
        """Handle an event of the top directory itself; others are reported by their parents."""
        if folder or self._file_name:
            return
        if event.mask & _ENDS:
            self.ended = True
            self._report("move_from" if event.mask & inotify.MOVE_SELF else "delete", "", True)
        elif event.mask & inotify.ATTRIB:
            self._report("attrib", "", True)

    def _handle_entry(
        self, event: InotifyEvent, path: str, temporary: re.Match[str] | None
    ) -> None:
        kind = next((kind for bit, kind in _KINDS.items() if event.mask & bit), None)
        is_directory = bool(event.mask & inotify.ISDIR)
        if kind is None or (kind in ("attrib", "modify") and _UNNAMED.fullmatch(event.name)):
            return
        if temporary:
            # Of an atomic replacement, only the final rename is reported.
            if kind == "move_from":
                self._replacing[event.cookie] = "modify" if temporary[1] == "m" else "create"
            return
        if kind == "move_to":
            kind = self._replacing.pop(event.cookie, kind)
        if kind in ("create", "move_to") and (event.watch, event.name) in self._listed:
            self._listed.discard((event.watch, event.name))
            return
        if kind in ("delete", "move_from"):
            self._listed.discard((event.watch, event.name))
        self._report(kind, path, is_directory)
        if is_directory and self._recursive:
            self._follow(event, kind, path)

    def _follow(self, event: InotifyEvent, kind: ChangeKind, path: str) -> None:
        """Update the watches for a directory that came or went."""
        if kind == "move_from":
            self._moved_out[event.cookie] = path
        elif kind in ("create", "move_to"):
            if event.cookie in self._moved_out:
                self._rebase(self._moved_out.pop(event.cookie), path)
            # A moved directory too: new content was not found under its old name.
            self._watch_tree(path, report=True)

    def _watch_tree(self, path: str, *, report: bool) -> set[int]:
        """Watch a directory and those below it; return the watches.

        With `report`, the content of directories that were not watched before is reported.
        """
        watched: set[int] = set()
        pending = [path]
        with contextlib.suppress(FileNotFoundError), closing(self._open_top()) as top:
            while pending:
                checkpoint()
                folder = pending.pop()
                with contextlib.suppress(OSError), closing(open_beneath(top, folder, LIST)) as fd:
                    if folder and is_kernel_file(fd):
                        continue
                    known = len(self._paths)
                    watch = self._add_watch(fd, folder)
                    watched.add(watch)
                    fresh = len(self._paths) > known
                    pending += self._list(fd, folder, watch, report=report and fresh)
        return watched

    def _add_watch(self, fd: int, folder: str) -> int:
        watch = self._inotify.add(fd, _MASK)
        if watch not in self._paths and self._count() >= MAX_DIRECTORIES:
            self._inotify.remove(watch)
            raise LimitReached(
                f"{self._path}: the sandbox already watches {MAX_DIRECTORIES} directories.",
                hint="Exclude some, or watch a directory further down.",
                limit=MAX_DIRECTORIES,
            )
        self._paths[watch] = folder
        return watch

    def _list(self, fd: int, folder: str, watch: int, *, report: bool) -> list[str]:
        """Return the subdirectories to watch next; with `report`, report every entry."""
        if not report and not self._recursive:
            return []
        folders: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if self._exclude.cover(path) or TEMPORARY.fullmatch(entry.name):
                    continue
                is_directory = entry.is_dir(follow_symlinks=False)
                if is_directory:
                    folders.append(path)
                if report:
                    if len(self._listed) < MAX_CHANGES:
                        self._listed.add((watch, entry.name))
                    self._report("create", path, is_directory)
        return folders

    def _rebase(self, old: str, new: str) -> None:
        for watch, path in self._paths.items():
            if path == old or path.startswith(f"{old}/"):
                self._paths[watch] = new + path[len(old) :]

    def _unwatch_tree(self, path: str) -> None:
        for watch, folder in list(self._paths.items()):
            if folder == path or folder.startswith(f"{path}/"):
                del self._paths[watch]
                self._inotify.remove(watch)

    def _start_over(self) -> None:
        """Watch the tree again after the kernel dropped events, and report a resync."""
        self._moved_out.clear()
        self._listed.clear()
        kept = self._watch_tree("", report=False)
        for watch in self._paths.keys() - kept:
            del self._paths[watch]
            self._inotify.remove(watch)
        self._changes = [FileChange("resync", self._path, True)]

    def _report(self, kind: ChangeKind, path: str, is_directory: bool) -> None:
        if path and self._include and not self._include.match(path):
            return
        absolute = posixpath.join(self._path, path) if path else self._path
        change = FileChange(kind, absolute, is_directory)
        if self._changes and self._changes[-1] == change:
            return
        if len(self._changes) >= MAX_CHANGES:
            self._changes = [FileChange("resync", self._path, True)]
        self._changes.append(change)
