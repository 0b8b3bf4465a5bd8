"""What changes below a directory of a sandbox, told by the kernel, as blocking calls.

A directory that appears is watched first and listed then, so that nothing in it is
missed; what both tell is told once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import stat as stat_bits
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine import inotify
from smokebox.engine.files.descriptors import LIST, SEARCH, closing, naming, of_kernel, open_beneath
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.files.replacement import TEMPORARY
from smokebox.engine.inotify import Inotify
from smokebox.engine.workers import checkpoint
from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from smokebox.engine.files.rooted import Rooted
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
_READS = 64
# What the kernel calls a file that has no name yet.
_NAMELESS = re.compile(r"#\d+")


@dataclass(frozen=True, slots=True)
class FileChange:
    """One thing that happened to a path. `resync` says that some may have been missed."""

    kind: ChangeKind
    path: str
    is_directory: bool = False


class Observer:
    """Watches a directory, or a file by its parent.

    `count` tells how many directories all watches of the sandbox have together: the
    kernel gives all sandboxes of a host one number.
    """

    def __init__(
        self,
        path: str,
        *,
        recursive: bool,
        include: tuple[str, ...],
        exclude: tuple[str, ...],
        count: Callable[[], int],
    ) -> None:
        self._path = path
        self._recursive = recursive
        self._include = Patterns("include", include)
        self._exclude = Patterns("exclude", exclude)
        self._only = ""
        self._paths: dict[int, str] = {}
        self._listed: set[tuple[int, str]] = set()
        self._leaving: dict[int, str] = {}
        self._taking_place: dict[int, ChangeKind] = {}
        self._changes: list[FileChange] = []
        self._count = count
        self.ended = False

    @property
    def directories(self) -> int:
        """How many directories it watches."""
        return len(self._paths)

    def run(self, files: Rooted) -> Generator[list[FileChange], None, None]:
        """Begin to watch, then give what happened each time it is asked."""
        with naming(self._path), contextlib.closing(Inotify()) as self._inotify:
            self.fileno = self._inotify.fd
            self._files = files
            self._find_top()
            self._watch_tree("", tell=False)
            yield []
            while not self.ended:
                yield self._drain()

    def _find_top(self) -> None:
        with closing(self._files.open(self._path, os.O_PATH)) as fd:
            self._stat = os.fstat(fd)
        if not stat_bits.S_ISDIR(self._stat.st_mode):
            self._path, self._only = posixpath.split(self._path)
            self._recursive = False
        # A directory that may be seen but not listed says so here, and not by silence.
        with closing(self._files.open(self._path, LIST)) as fd:
            self._stat = os.fstat(fd)

    def _open_top(self) -> int:
        # Not held open in between, as the kernel tells of the end of what nobody holds only.
        fd = self._files.open(self._path, SEARCH)
        if not os.path.samestat(os.fstat(fd), self._stat):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return fd

    def _drain(self) -> list[FileChange]:
        for _ in range(_READS):
            checkpoint()
            events = self._inotify.read()
            for event in events:
                self._take(event)
            if not events:
                # All that was told before the last listing is read: what comes is fresh.
                self._listed.clear()
                self._taking_place.clear()
                while self._leaving:
                    self._forget(self._leaving.popitem()[1])
                break
        changes, self._changes = self._changes, []
        return changes

    def _take(self, event: InotifyEvent) -> None:
        if event.mask & inotify.OVERFLOW:
            self._start_over()
            return
        folder = self._paths.get(event.watch)
        if event.mask & inotify.IGNORED:
            self._paths.pop(event.watch, None)
        if folder is None:
            return
        if not event.name:
            self._take_own(event, folder)
        elif not self._only or event.name == self._only or TEMPORARY.fullmatch(event.name):
            path = f"{folder}/{event.name}" if folder else event.name
            if not self._exclude.cover(path):
                self._take_entry(event, path)

    def _take_own(self, event: InotifyEvent, folder: str) -> None:
        """What happened to a watched directory itself; its parent tells the rest."""
        if folder or self._only:
            return
        if event.mask & _ENDS:
            self.ended = True
            self._tell("move_from" if event.mask & inotify.MOVE_SELF else "delete", "", True)
        elif event.mask & inotify.ATTRIB:
            self._tell("attrib", "", True)

    def _take_entry(self, event: InotifyEvent, path: str) -> None:
        kind = next((kind for bit, kind in _KINDS.items() if event.mask & bit), None)
        is_directory = bool(event.mask & inotify.ISDIR)
        temporary = TEMPORARY.fullmatch(event.name)
        if kind is None or (kind in ("attrib", "modify") and _NAMELESS.fullmatch(event.name)):
            return
        if temporary:
            # Of a file that is written beside its place, only the end is news.
            if kind == "move_from":
                taken = temporary[1] == "m"
                self._taking_place[event.cookie] = "modify" if taken else "create"
            return
        if kind == "move_to":
            kind = self._taking_place.pop(event.cookie, kind)
        if kind in ("create", "move_to") and (event.watch, event.name) in self._listed:
            self._listed.discard((event.watch, event.name))
            return
        if kind in ("delete", "move_from"):
            self._listed.discard((event.watch, event.name))
        self._tell(kind, path, is_directory)
        if is_directory and self._recursive:
            self._follow(event, kind, path)

    def _follow(self, event: InotifyEvent, kind: ChangeKind, path: str) -> None:
        """Keep up with directories that come and go."""
        if kind == "move_from":
            self._leaving[event.cookie] = path
        elif kind in ("create", "move_to"):
            if event.cookie in self._leaving:
                self._rebase(self._leaving.pop(event.cookie), path)
            # Also of one that moved: what appeared in it under its old name was not found.
            self._watch_tree(path, tell=True)

    def _watch_tree(self, path: str, *, tell: bool) -> set[int]:
        """Watch a directory and those below it.

        With `tell`, what is in those that were not watched before is news.
        """
        watched: set[int] = set()
        pending = [path]
        with contextlib.suppress(FileNotFoundError), closing(self._open_top()) as top:
            while pending:
                checkpoint()
                folder = pending.pop()
                with contextlib.suppress(OSError), closing(open_beneath(top, folder, LIST)) as fd:
                    if folder and of_kernel(fd):
                        continue
                    known = len(self._paths)
                    watch = self._add(fd, folder)
                    watched.add(watch)
                    fresh = len(self._paths) > known
                    pending += self._list(fd, folder, watch, tell=tell and fresh)
        return watched

    def _add(self, fd: int, folder: str) -> int:
        watch = self._inotify.add(fd, _MASK)
        if watch not in self._paths and self._count() >= MAX_DIRECTORIES:
            self._inotify.remove(watch)
            raise LimitReached(
                f"{self._path}: a sandbox may watch {MAX_DIRECTORIES} directories, and has them.",
                hint="Exclude some, or watch one further down.",
                limit=MAX_DIRECTORIES,
            )
        self._paths[watch] = folder
        return watch

    def _list(self, fd: int, folder: str, watch: int, *, tell: bool) -> list[str]:
        """The directories in a directory to watch next; with `tell`, all that is in it is news."""
        if not tell and not self._recursive:
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
                if tell:
                    if len(self._listed) < MAX_CHANGES:
                        self._listed.add((watch, entry.name))
                    self._tell("create", path, is_directory)
        return folders

    def _rebase(self, old: str, new: str) -> None:
        for watch, path in self._paths.items():
            if path == old or path.startswith(f"{old}/"):
                self._paths[watch] = new + path[len(old) :]

    def _forget(self, path: str) -> None:
        for watch, folder in list(self._paths.items()):
            if folder == path or folder.startswith(f"{path}/"):
                del self._paths[watch]
                self._inotify.remove(watch)

    def _start_over(self) -> None:
        """The kernel dropped events: watch what is there, and say that some were missed."""
        self._leaving.clear()
        self._listed.clear()
        kept = self._watch_tree("", tell=False)
        for watch in self._paths.keys() - kept:
            del self._paths[watch]
            self._inotify.remove(watch)
        self._changes = [FileChange("resync", self._path, True)]

    def _tell(self, kind: ChangeKind, path: str, is_directory: bool) -> None:
        if path and self._include and not self._include.fit(path):
            return
        change = FileChange(
            kind, posixpath.join(self._path, path) if path else self._path, is_directory
        )
        if self._changes and self._changes[-1] == change:
            return
        if len(self._changes) >= MAX_CHANGES:
            self._changes = [FileChange("resync", self._path, True)]
        self._changes.append(change)
