"""The difference of two states of an upper layer, as files to copy and paths to hide.

Written to a directory it is a layer: stacked on the layers of the first state, it shows the
second one.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.engine.snapshots.tree_index import IndexEntry, TreeIndex


@dataclass(slots=True)
class Delta:
    """A layer to write.

    `directories` maps paths, parents first, to whether the directory is opaque: one that hides
    the directories of the same path in the layers below. `files` are copied, and at `hidden`
    paths files of the layers below are hidden. `attributes` is set if a directory is new, or
    differs in more than its times.
    """

    directories: dict[str, bool] = field(default_factory=dict)
    files: dict[str, IndexEntry] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    attributes: bool = False

    @property
    def empty(self) -> bool:
        """True if the states are the same."""
        return not (self.directories or self.files or self.hidden)

    @property
    def only_times(self) -> bool:
        """True if no more than times of directories differ: a file came and went."""
        return not (self.files or self.hidden or self.attributes)

    @property
    def disk(self) -> int:
        """The bytes that it occupies, roughly."""
        linked = {entry.inode: entry.disk for entry in self.files.values()}
        return sum(linked.values()) + 4096 * len(self.directories)


def compare(old: TreeIndex | None, new: TreeIndex) -> Delta:
    """Return the difference of an upper layer to its earlier state; None is that of no file.

    A directory that is not the one it was is copied with all that is in it, and hides what the
    layers below have there.
    """
    return _Comparison(old or {}, new).run()


class _Comparison:
    def __init__(self, old: TreeIndex, new: TreeIndex) -> None:
        self._old = old
        self._new = new
        # Directories that are copied with all that is in them.
        self._whole: set[str] = set()
        self._delta = Delta()

    def run(self) -> Delta:
        old = self._old
        for path, entry in self._new.items():
            if old.get(path) is entry and not self._whole:
                continue
            if entry.is_directory:
                self._add_directory(path, entry)
            else:
                self._add_file(path, entry)
        for path in self._old:
            if path not in self._new:
                self._hide(path)
        return self._delta

    def _add_directory(self, path: str, entry: IndexEntry) -> None:
        before = self._old.get(path)
        if before is not None and not self._is_whole(path) and _is_same_place(before, entry):
            if not before.same(entry):
                self._need(path)
                self._delta.attributes |= not _differ_in_times_only(before, entry)
            return
        if path:
            self._need(posixpath.dirname(path))
        self._delta.attributes = True
        self._delta.directories[path] = entry.opaque or before is not None
        self._whole.add(path)

    def _add_file(self, path: str, entry: IndexEntry) -> None:
        before = self._old.get(path)
        if before is None or self._is_whole(path) or not before.same(entry):
            self._need(posixpath.dirname(path))
            self._delta.files[path] = entry

    def _hide(self, path: str) -> None:
        parent = posixpath.dirname(path)
        above = self._new.get(parent)
        if above is not None and above.is_directory and parent not in self._whole:
            self._need(parent)
            self._delta.hidden.append(path)

    def _is_whole(self, path: str) -> bool:
        return bool(path) and posixpath.dirname(path) in self._whole

    def _need(self, path: str) -> None:
        """Add a directory that shows what the layers below have in it, with those above it."""
        missing = []
        while path not in self._delta.directories:
            missing.append(path)
            if not path:
                break
            path = posixpath.dirname(path)
        for one in reversed(missing):
            self._delta.directories[one] = False


def _differ_in_times_only(before: IndexEntry, entry: IndexEntry) -> bool:
    # A change of extended attributes leaves the time of modification as it is.
    moved = entry.mtime_ns != before.mtime_ns or before.ctime_ns == 0
    return moved and before.mode == entry.mode and before[7:9] == entry[7:9]


def _is_same_place(before: IndexEntry, entry: IndexEntry) -> bool:
    """Return whether it is the directory that it was, whatever is in it."""
    return before.is_directory and before.inode == entry.inode and before.opaque == entry.opaque
