"""Comparison of two stacks of layers: the paths that differ in what the stacks show."""

from __future__ import annotations

import contextlib
import difflib
import os
import posixpath
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import (
    LIST,
    REPLACED,
    SEARCH,
    closing,
    open_beneath,
    open_child,
)
from smokebox.engine.images.overlay import is_opaque
from smokebox.engine.snapshots.tree_index import (
    IndexEntry,
    close_again,
    entry_of,
    open_readable,
    scan,
)
from smokebox.engine.workers import checkpoint
from smokebox.types import SnapshotDiff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.engine.images.image import Layer
    from smokebox.engine.snapshots.tree_index import TreeIndex

MAX_PATHS = 100_000
MAX_TEXT = 1 << 20
MAX_TEXTS = 8 << 20
_CHUNK = 1 << 20

Modes = dict[tuple[str, str], int]
"""Modes of directories that were opened to their owner, by the path of the layer and their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSide:
    """A state to compare: layers of snapshots on those of an image, the uppermost first."""

    own: tuple[Layer, ...]
    base: tuple[Layer, ...]

    def trees(self, target: str) -> list[Layer]:
        """Return the layers that are seen at a target."""
        return [one for one in (*self.own, *self.base) if one.target == target]


@dataclass(slots=True)
class _Place:
    """A path in a view: its entry in the uppermost layer, and the layers that show it."""

    entry: IndexEntry
    layers: list[int]


class View:
    """The files that a stack of layers shows at one target."""

    def __init__(self, layers: Sequence[Layer], stack: contextlib.ExitStack, modes: Modes) -> None:
        self._paths = [layer.path for layer in layers]
        self._modes = modes
        self._tops = []
        for layer in layers:
            self._tops.append(os.open(layer.path, LIST | os.O_CLOEXEC))
            stack.callback(os.close, self._tops[-1])
        self._places: dict[str, _Place | None] = {}

    def find(self, path: str) -> _Place | None:
        """Return what is seen at a path, if anything."""
        if path not in self._places:
            self._places[path] = self._look_up(path)
        return self._places[path]

    def names(self, path: str) -> set[str]:
        """Return the names in a directory, or nothing for other files."""
        place = self.find(path)
        if place is None or not place.entry.is_directory:
            return set()
        names: set[str] = set()
        for layer in place.layers:
            with (
                contextlib.suppress(OSError),
                closing(open_beneath(self._tops[layer], path, LIST)) as fd,
            ):
                names.update(os.listdir(fd))
        return {name for name in names if self.find(posixpath.join(path, name)) is not None}

    def open(self, path: str, place: _Place) -> int:
        """Open a file for reading."""
        folder, name = posixpath.split(path)
        with closing(open_beneath(self._tops[place.layers[0]], folder, SEARCH)) as fd:
            return open_readable(fd, name)

    def link(self, path: str, place: _Place) -> str:
        """Return the target of a symlink."""
        folder, name = posixpath.split(path)
        with closing(open_beneath(self._tops[place.layers[0]], folder, SEARCH)) as fd:
            return os.readlink(name, dir_fd=fd)

    def identity(self, place: _Place) -> tuple[int, int]:
        """Return the device and the inode of a file: layers never change."""
        return os.fstat(self._tops[place.layers[0]]).st_dev, place.entry.inode

    def _look_up(self, path: str) -> _Place | None:
        if not path:
            return _Place(entry_of(os.fstat(self._tops[0])), list(range(len(self._tops))))
        folder, name = posixpath.split(path)
        above = self.find(folder)
        if above is None or not above.entry.is_directory:
            return None
        found: _Place | None = None
        for layer in above.layers:
            entry = self._stat(layer, folder, name)
            if entry is None:
                continue
            if not entry.is_directory:
                if found is None and not entry.is_whiteout:
                    found = _Place(entry, [layer])
                break
            if found is None:
                found = _Place(entry, [])
            found.layers.append(layer)
            if entry.opaque:
                break
        return found

    def _stat(self, layer: int, folder: str, name: str) -> IndexEntry | None:
        try:
            with closing(open_beneath(self._tops[layer], folder, SEARCH)) as fd:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode):
                    return entry_of(found)
                with closing(open_child(fd, name, LIST)) as directory:
                    entry = entry_of(found, opaque=is_opaque(directory))
                mode = self._modes.get((self._paths[layer], posixpath.join(folder, name)))
                return entry if mode is None else entry._replace(mode=stat.S_IFDIR | mode)
        except OSError as error:
            if error.errno not in REPLACED:
                raise
            return None


@dataclass(slots=True)
class _Comparison:
    """A comparison of two views at one target."""

    target: str
    before: View
    after: View
    # Directories that differ in the layers, by whether all in them has to be compared.
    touched: dict[str, bool]
    texts: bool
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    diffs: dict[str, str] = field(default_factory=dict)

    def run(self, children: dict[str, set[str]]) -> None:
        pending = [("", False)]
        while pending and self.complete:
            checkpoint()
            path, whole = pending.pop()
            whole = whole or self.touched.get(path, False)
            names = children.get(path, set())
            if whole:
                names = self.before.names(path) | self.after.names(path)
            for name in sorted(names):
                child = posixpath.join(path, name)
                if self._compare(child) or child in self.touched:
                    pending.append((child, whole))
                elif whole and (self.before.names(child) or self.after.names(child)):
                    pending.append((child, True))

    @property
    def complete(self) -> bool:
        return len(self.added) + len(self.changed) + len(self.removed) <= MAX_PATHS

    def _compare(self, path: str) -> bool:
        """Compare one path; returns True if it is a directory of one side only."""
        old, new = self.before.find(path), self.after.find(path)
        if old is None and new is None:
            return False
        shown = posixpath.join(self.target, path)
        if old is None or new is None:
            place = new or old
            assert place is not None
            (self.added if old is None else self.removed).append(shown)
            if place.entry.is_directory:
                self.touched[path] = True
                return True
            return False
        if self._differs(path, old, new):
            self.changed.append(shown)
            if self.texts:
                self._add_text(path, shown, old, new)
        if old.entry.is_directory != new.entry.is_directory:
            self.touched[path] = True
            return True
        return False

    def _differs(self, path: str, old: _Place, new: _Place) -> bool:
        if (old.entry.mode, old.entry.uid, old.entry.gid) != (
            new.entry.mode,
            new.entry.uid,
            new.entry.gid,
        ):
            return True
        if stat.S_ISLNK(old.entry.mode):
            return self.before.link(path, old) != self.after.link(path, new)
        if not stat.S_ISREG(old.entry.mode):
            return False
        if self.before.identity(old) == self.after.identity(new):
            return False
        return old.entry.size != new.entry.size or not self._same_content(path, old, new)

    def _same_content(self, path: str, old: _Place, new: _Place) -> bool:
        with (
            open(self.before.open(path, old), "rb") as first,
            open(self.after.open(path, new), "rb") as second,
        ):
            while True:
                checkpoint()
                data = first.read(_CHUNK)
                if data != second.read(_CHUNK):
                    return False
                if not data:
                    return True

    def _add_text(self, path: str, shown: str, old: _Place, new: _Place) -> None:
        if not (stat.S_ISREG(old.entry.mode) and stat.S_ISREG(new.entry.mode)):
            return
        if max(old.entry.size, new.entry.size) > MAX_TEXT:
            return
        texts = []
        for view, place in ((self.before, old), (self.after, new)):
            with open(view.open(path, place), "rb") as file:
                try:
                    texts.append(file.read().decode().splitlines(keepends=True))
                except UnicodeDecodeError:
                    return
        lines = difflib.unified_diff(texts[0], texts[1], f"a{shown}", f"b{shown}")
        text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
        if text and sum(map(len, self.diffs.values())) + len(text) <= MAX_TEXTS:
            self.diffs[shown] = text


def compare_stacks(before: DiffSide, after: DiffSide, *, texts: bool) -> SnapshotDiff:
    """Compare two states."""
    parts = []
    targets = sorted({layer.target for side in (before, after) for layer in side.base})
    for target in targets:
        with contextlib.ExitStack() as stack:
            parts.append(_compare_target(before, after, target, stack, texts=texts))
    return SnapshotDiff(
        added=sorted(path for part in parts for path in part.added),
        changed=sorted(path for part in parts for path in part.changed),
        removed=sorted(path for part in parts for path in part.removed),
        texts={path: text for part in parts for path, text in part.diffs.items()},
        complete=all(part.complete for part in parts),
    )


def _compare_target(
    before: DiffSide, after: DiffSide, target: str, stack: contextlib.ExitStack, *, texts: bool
) -> _Comparison:
    first, second = ([one.path for one in side.trees(target)] for side in (before, after))
    # What both have at the bottom cannot differ, wherever it is seen.
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    touched: dict[str, bool] = {}
    children: dict[str, set[str]] = {}
    modes: Modes = {}
    differing = {*first, *second}
    # Root reads every directory; for others, all that may be looked into have to be opened.
    others = {one.path for side in (before, after) for one in side.own if one.target == target}
    for path in differing if os.geteuid() == 0 else differing | others:
        index = _scan_layer(path, stack, modes)
        if path in differing:
            _collect(index, touched, children)
    comparison = _Comparison(
        target=target,
        before=View(before.trees(target), stack, modes),
        after=View(after.trees(target), stack, modes),
        touched=touched,
        texts=texts,
    )
    comparison.run(children)
    return comparison


def _scan_layer(path: str, stack: contextlib.ExitStack, modes: Modes) -> TreeIndex:
    top = os.open(path, LIST | os.O_CLOEXEC)
    stack.callback(os.close, top)
    opened: dict[str, int] = {}
    stack.callback(close_again, top, opened)
    index = scan(top, opened)
    modes.update({(path, name): mode for name, mode in opened.items()})
    return index


def _collect(index: TreeIndex, touched: dict[str, bool], children: dict[str, set[str]]) -> None:
    for path, entry in index.items():
        if path:
            folder, name = posixpath.split(path)
            children.setdefault(folder, set()).add(name)
        if entry.is_directory:
            touched[path] = touched.get(path, False) or entry.opaque
