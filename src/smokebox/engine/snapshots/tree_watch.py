"""Finding what changed in a tree since it was listed, without listing it again.

Programs are frozen for that. What they write to files is seen by watches in the overlay, through
which they write: the upper layer itself gives no events. The watches are on files, as a directory
tells nothing of what is done through another name of a file. Files that are created, renamed or
removed change their directory in the upper layer, and so do copies of files of the layers below.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import (
    BENEATH,
    IN_ROOT,
    LIST,
    SEARCH,
    closing,
    open_beneath,
)
from smokebox.engine.inotify import ATTRIB, CLOSE_WRITE, MODIFY, MOVE_SELF, OVERFLOW, Inotify
from smokebox.engine.jail import linux
from smokebox.engine.jail.linux import openat2
from smokebox.engine.snapshots.tree_index import (
    IndexEntry,
    TreeIndex,
    entry_of,
    is_temporary,
    scan,
    with_opaque,
)
from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIMIT = "/proc/sys/fs/inotify/max_user_watches"

# A rename changes the time of a file, under its other names too.
_MASK = MODIFY | ATTRIB | CLOSE_WRITE | MOVE_SELF


class _Budget:
    """The watches of all captures: the host's limit is for other watches of the engine too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0

    def take(self, count: int) -> None:
        """Take so many. Raises `LimitReached` for more than half of the limit in all."""
        with open(_LIMIT, encoding="ascii") as file:
            most = int(file.read()) // 2
        with self._lock:
            if self._used + count > most:
                raise LimitReached(
                    f"captures may have {most} watches, and {self._used + count} are needed.",
                    hint="Raise it with `sysctl fs.inotify.max_user_watches=...`.",
                    limit="fs.inotify.max_user_watches",
                )
            self._used += count

    def give_back(self, count: int) -> None:
        """Return watches that were taken."""
        with self._lock:
            self._used -= count


_budget = _Budget()


class TreeWatch:
    """Watches on the files of an index, from before a second index is made.

    Args:
        root: The root directory of the sandbox.
        target: Where the tree is seen in it.
        index: The files of the tree.

    Raises:
        LimitReached: The host has no more watches.
    """

    def __init__(self, root: int, target: str, index: TreeIndex) -> None:
        self._prefix = f"{target.rstrip('/')}/"
        self._first = index
        self._watched: set[str] = set()
        # Names of one file have one watch.
        self._paths: dict[int, list[str]] = {}
        self._taken = len(index)
        _budget.take(self._taken)
        try:
            self._inotify = Inotify()
        except BaseException:
            _budget.give_back(self._taken)
            raise
        try:
            with closing(openat2(root, target, SEARCH, resolve=IN_ROOT)) as top:
                for folder, names in _names_of(index).items():
                    self._watch(top, folder, names)
        except BaseException:
            self.close()
            raise
        # From here on as `settle` finds them.
        self._index: TreeIndex = {}
        self._folders: list[str] = []
        self._names: dict[str, list[str]] = {}
        self._unsettled: set[str] = set()
        self._suspects: list[str] = []
        self._by_inode: dict[int, list[str]] = {}

    def _watch(self, top: int, folder: str, paths: list[str]) -> None:
        # What cannot be watched, for example below a mount, is looked at again. Not across mounts:
        # opening a directory of a bucket may take for ever.
        resolve = BENEATH | linux.RESOLVE_NO_XDEV
        with (
            contextlib.suppress(OSError),
            closing(openat2(top, os.fsencode(folder) or b".", SEARCH, resolve=resolve)) as fd,
        ):
            for path in paths:
                if not self._first[path].is_directory:
                    with contextlib.suppress(OSError):
                        watch = self._inotify.add_name(fd, posixpath.basename(path), _MASK)
                        self._paths.setdefault(watch, []).append(path)
                        self._watched.add(path)

    def settle(self, index: TreeIndex, settled_ns: int) -> None:
        """Take the index that was made after the watches, from which `rescan` finds changes.

        Args:
            index: The files of the tree.
            settled_ns: A directory that was last changed before this time is known by that time.
        """
        self._index, self._names = index, _names_of(index)
        # Another file may have been there when the watch was added.
        for paths in self._paths.values():
            if len({index[path].inode for path in paths if path in index}) > 1:
                self._watched.difference_update(paths)
        for path, entry in index.items():
            if entry.is_directory:
                self._folders.append(path)
                if entry.ctime_ns >= settled_ns:
                    self._unsettled.add(path)
            else:
                self._by_inode.setdefault(entry.inode, []).append(path)
                first = self._first.get(path)
                if path not in self._watched or first is None or first.inode != entry.inode:
                    self._suspects.append(path)

    def rescan(self, top: int, mapped: set[int], opened: Iterable[str]) -> TreeIndex | None:
        """Return the index of the tree, which does not change, or None if it has to be listed.

        Args:
            top: The open directory.
            mapped: Inodes that programs can write to through a mapping, which gives no events.
            opened: Files that programs have open, by their paths in the sandbox.
        """
        suspects = self._read_events()
        if suspects is None:
            return None
        suspects.update(self._suspects)
        suspects.update(path for inode in mapped for path in self._by_inode.get(inode, ()))
        size = len(self._prefix)
        suspects.update(path[size:] for path in opened if path.startswith(self._prefix))
        rescan = _Rescan(top, self._index, self._names)
        try:
            found = rescan.run(self._folders, self._unsettled, suspects)
        except OSError:
            # The engine may remove a file at any time.
            return None
        return found if is_watchable(found) else None

    def _read_events(self) -> set[str] | None:
        found: set[str] = set()
        while events := self._inotify.read():
            for event in events:
                if event.mask & OVERFLOW:
                    return None
                found.update(self._paths.get(event.watch, ()))
        return found

    def close(self) -> None:
        """Remove the watches."""
        self._inotify.close()
        _budget.give_back(self._taken)


class _Rescan:
    """Brings an index up to date. `names` has the paths in each directory of it."""

    def __init__(self, top: int, index: TreeIndex, names: dict[str, list[str]]) -> None:
        self._top = top
        self._before = index
        self._names = names
        self._index = dict(index)
        # Directories whose files are no longer those of the index.
        self._replaced: set[str] = set()

    def run(
        self, folders: Iterable[str], unsettled: set[str], suspects: Iterable[str]
    ) -> TreeIndex:
        # Parents first: below a directory that is the one it was, no symlink is followed.
        for path in folders:
            parent = posixpath.dirname(path)
            if path and parent in self._replaced:
                self._replaced.add(path)
            elif path not in self._replaced:
                entry = entry_of(os.stat(path or ".", dir_fd=self._top, follow_symlinks=False))
                before = self._before[path]
                # The other fields cannot change without the time.
                if (entry.inode, entry.ctime_ns) != before[1:3] or path in unsettled:
                    self._list(path)
        for path in suspects:
            known = self._before.get(path)
            if known is None or known.is_directory or posixpath.dirname(path) in self._replaced:
                continue
            # One that is gone changed its directory.
            with contextlib.suppress(FileNotFoundError):
                entry = entry_of(os.stat(path, dir_fd=self._top, follow_symlinks=False))
                if path in self._index and not entry.is_directory and entry != known:
                    self._index[path] = entry
        return self._index

    def _list(self, folder: str) -> None:
        """List a directory again, and what is new in it with all that is below."""
        prefix = f"{folder}/" if folder else ""
        found = set()
        with closing(open_beneath(self._top, folder, LIST)) as fd:
            entry = with_opaque(entry_of(os.fstat(fd)), fd, self._before.get(folder))
            self._index[folder] = entry
            with os.scandir(fd) as entries:
                for one in entries:
                    known = self._before.get(path := prefix + one.name)
                    if known is not None and _is_same(known, one):
                        # Its watch tells what else changed, or it is a directory, whose turn comes.
                        found.add(path)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = one.stat(follow_symlinks=False)
                        if not is_temporary(one.name, status.st_mode):
                            found.add(path)
                            self._put(path, status)
        for path in self._names.get(folder, ()):
            if path not in found:
                self._remove(path)

    def _put(self, path: str, status: os.stat_result) -> None:
        entry, known = entry_of(status), self._before.get(path)
        if known is not None and known.is_directory:
            self._remove(path)
        if entry.is_directory:
            with closing(open_beneath(self._top, path, LIST)) as fd:
                below = scan(fd)
            self._index[path] = below.pop("")
            for name, one in below.items():
                self._index[f"{path}/{name}"] = one
        elif known is None or known.is_directory or entry != known:
            self._index[path] = entry

    def _remove(self, path: str) -> None:
        pending = [path]
        while pending:
            one = pending.pop()
            self._index.pop(one, None)
            if one in self._names:
                pending += self._names[one]
            if self._before[one].is_directory:
                self._replaced.add(one)


def _is_same(known: IndexEntry, found: os.DirEntry[str]) -> bool:
    # The number of a file that was removed may be used again.
    return known.inode == found.inode() and known.is_directory == found.is_dir(
        follow_symlinks=False
    )


def _names_of(index: TreeIndex) -> dict[str, list[str]]:
    """Return the paths in each directory."""
    names: dict[str, list[str]] = {}
    for path in index:
        if path:
            names.setdefault(posixpath.dirname(path), []).append(path)
    return names


def open_files(pids: Iterable[int]) -> set[str]:
    """Return the files that processes have open, by their paths in the sandbox."""
    found: set[str] = set()
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"{folder}/{name}"))
    return found


def is_watchable(index: TreeIndex) -> bool:
    """Return whether this process can read all directories of a tree as they are."""
    return os.geteuid() == 0 or all(
        entry.mode & 0o700 == 0o700 for entry in index.values() if entry.is_directory
    )
