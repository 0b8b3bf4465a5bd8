"""Capture of the upper layers of a sandbox as layers, while it runs or sleeps.

The files that changed since the capture before are copied while programs run. Then the programs
are frozen, what changed meanwhile is copied, and they go on. In a tree with many files, watches
from before a second copy tell what that is. The index of the captured state stays beside the upper
layers, for the next capture.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from smokebox.engine.disk import available_bytes
from smokebox.engine.files.descriptors import LIST, closing
from smokebox.engine.images.overlay import OVERLAY, xattrs_of
from smokebox.engine.snapshots import tree_index
from smokebox.engine.snapshots.delta import Delta, compare
from smokebox.engine.snapshots.tree_copier import TreeCopier
from smokebox.engine.snapshots.tree_index import TreeIndex, scan, settled
from smokebox.engine.snapshots.tree_watch import TreeWatch, is_watchable, open_files
from smokebox.errors import LimitReached, StorageFull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from smokebox.engine.images.layer_folder import UnfinishedLayer

# The latest state that a snapshot has, and the latest of all, if that is a later one: its layers
# go with the forks that it was captured for.
_LASTING, _BRANCHED = "captured", "branched"
# So few files are copied while programs are frozen.
_AT_ONCE_FILES, _AT_ONCE_BYTES = 16, 1 << 20
# Listing fewer files takes as long as watching them, and more watches take too much memory.
_LISTED_FILES, _WATCHED_FILES = 500, 50_000


class _Captured(msgspec.Struct):
    """The file of the latest capture: the layers that show it, and its index.

    It is of the upper layers with these inodes, on the layers `base`.
    """

    base: list[str]
    layers: list[str]
    tops: list[tuple[int, int]]
    indexes: bytes


@dataclass(slots=True)
class CaptureState:
    """The latest captured state of a sandbox. Without `indexes`, there is none."""

    layers: tuple[str, ...]
    indexes: list[TreeIndex] | None = None


@dataclass(slots=True)
class CapturedTree:
    """The changes of one upper layer, which become a layer seen at `target`.

    `base` is the directory that it had its attributes from.
    """

    target: str
    top: int
    base: str
    before: TreeIndex | None
    index: TreeIndex = field(default_factory=dict)
    delta: Delta = field(default_factory=Delta)
    unfinished: UnfinishedLayer | None = None
    copier: TreeCopier | None = None
    watch: TreeWatch | None = None
    size: int = 0
    late: int = 0

    def compare(self, opened: dict[str, int] | None) -> None:
        """Find the changes since the capture before. `opened` is as in `scan`."""
        self.index = scan(self.top, opened, self.index or self.before)
        self.find_delta()

    def find_delta(self) -> None:
        """Find the changes of the index since the capture before."""
        untouched = (
            self.before is None and len(self.index) == 1 and is_untouched(self.top, self.base)
        )
        self.delta = Delta() if untouched else compare(self.before, self.index)
        self.size = self.delta.disk

    def with_top(self) -> Delta:
        """Return the changes with the attributes of the top: they come from the uppermost layer."""
        if not self.delta.empty:
            directories = self.delta.directories
            self.delta.directories = {"": directories.get("", False), **directories}
        return self.delta

    def copy(self, begin: Callable[[], UnfinishedLayer]) -> TreeCopier:
        """Return the copier of its files, with a layer to write to."""
        if self.copier is None:
            self.unfinished = begin()
            self.copier = TreeCopier(self.unfinished.files)
        return self.copier

    def layer(self) -> UnfinishedLayer:
        """Return the layer that its files were copied to."""
        assert self.unfinished is not None
        return self.unfinished

    def close(self) -> None:
        """Close what is open, and remove a layer that was not placed."""
        self.unwatch()
        if self.copier is not None:
            self.copier.close()
        if self.unfinished is not None:
            self.unfinished.close()
        os.close(self.top)

    def unwatch(self) -> None:
        """Remove the watches."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()


@dataclass(slots=True)
class Capture:
    """A capture under way of the upper layers below `uppers`. `begin` returns an empty layer.

    `bases` are directories that the upper layers had their attributes from, by target.
    """

    uppers: str
    bases: Mapping[str, str]
    before: CaptureState
    begin: Callable[[], UnfinishedLayer]
    trees: list[CapturedTree] = field(default_factory=list)
    at_ns: int = 0
    unsettled: set[int] = field(default_factory=set)
    _used: int | None = None

    @property
    def changed(self) -> list[CapturedTree]:
        """The trees with changes: mounts of a sandbox are limited."""
        return [tree for tree in self.trees if not tree.delta.empty]

    @property
    def size(self) -> int:
        """Bytes of the changes."""
        return sum(tree.size + tree.late for tree in self.trees)

    def used(self) -> int:
        """Return the bytes of the upper layers when they were listed first."""
        if self._used is None:
            linked = {
                (tree.target, one.inode): one.disk
                for tree in self.trees
                for one in tree.index.values()
            }
            self._used = sum(linked.values())
        return self._used

    def open(self) -> None:
        """Open the upper layers, which exist for a sandbox that ever ran."""
        for number, (target, base) in enumerate(sorted(self.bases.items())):
            path = os.path.join(self.uppers, str(number))
            top = os.open(path, LIST | os.O_NOFOLLOW | os.O_CLOEXEC)
            indexes = self.before.indexes
            before = None if indexes is None else indexes[number]
            self.trees.append(CapturedTree(target=target, top=top, base=base, before=before))

    def copy_ahead(self, pids: Callable[[], list[int]], check: Callable[[Capture], None]) -> None:
        """Copy what changed since the capture before, while programs run."""
        settled_ns = tree_index.now_ns() - tree_index.TICK_NS
        unsettled = tree_index.mapped_inodes(pids())
        for tree in self.trees:
            tree.compare(None)
            if tree.watch is not None:
                tree.watch.settle(tree.index, settled_ns)
        check(self)
        files = sum(len(tree.delta.files) for tree in self.trees)
        begun = any(tree.copier is not None for tree in self.trees)
        if begun or files > _AT_ONCE_FILES or self.size > _AT_ONCE_BYTES:
            for tree in self.changed:
                copier = tree.copy(self.begin)
                copier.copy_ahead(tree.top, tree.delta, tree.index, unsettled, settled_ns)

    def follow(
        self, root: int, pids: Callable[[], list[int]], check: Callable[[Capture], None]
    ) -> None:
        """Copy what changed meanwhile, while programs run, so that `finish` takes less time.

        Args:
            root: The root directory of the sandbox.
            pids: Returns its processes.
            check: Raises if there is no room.
        """
        files = sum(len(tree.index) for tree in self.trees)
        if not _LISTED_FILES <= files <= _WATCHED_FILES:
            return
        if not all(is_watchable(tree.index) for tree in self.trees):
            return
        try:
            for tree in self.trees:
                tree.watch = TreeWatch(root, tree.target, tree.index)
        except (OSError, LimitReached):
            # Then everything is listed while programs are frozen.
            self.unwatch()
            return
        self.copy_ahead(pids, check)

    def finish(self, pids: Callable[[], list[int]], check: Callable[[Capture], None]) -> None:
        """Copy the rest while nothing changes."""
        self.at_ns, processes = tree_index.now_ns(), pids()
        self.unsettled = tree_index.mapped_inodes(processes)
        if self._finish_watched(processes, check):
            return
        self.unwatch()
        with self.compared():
            if self.changed:
                check(self)
            for tree in self.changed:
                tree.copy(self.begin).copy_rest(tree.top, tree.with_top(), tree.index)

    def _finish_watched(self, pids: list[int], check: Callable[[Capture], None]) -> bool:
        """Copy what the watches tell; False if they do not tell all."""
        if any(tree.watch is None for tree in self.trees):
            return False
        opened = open_files(pids)
        for tree in self.trees:
            assert tree.watch is not None
            index = tree.watch.rescan(tree.top, self.unsettled, opened)
            if index is None:
                return False
            late = compare(tree.index, index)
            tree.index, tree.late = index, late.disk
            if not (late.empty and tree.delta.empty):
                check(self)
                copier = tree.copy(self.begin)
                copier.copy_late(tree.top, tree.with_top(), late, tree.index)
        return True

    def unwatch(self) -> None:
        """Remove all watches."""
        for tree in self.trees:
            tree.unwatch()

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Find the changes of trees that do not change, and open them to their owner."""
        opened: list[dict[str, int]] = [{} for _ in self.trees]
        try:
            for tree, modes in zip(self.trees, opened, strict=True):
                tree.compare(modes)
            yield
        finally:
            for tree, modes in zip(self.trees, opened, strict=True):
                tree_index.close_again(tree.top, modes)

    def complete(self) -> bool:
        """Complete the layers, and write them to the disk. The trees may change again.

        Returns False if a file is missing, so that `finish` has to be called again.
        """
        watched = any(tree.watch is not None for tree in self.trees)
        self.unwatch()
        if watched:
            for tree in self.trees:
                tree.late = 0
                tree.find_delta()
                delta = tree.with_top()
                if not delta.empty and not tree.copy(self.begin).take_over(delta, tree.index):
                    return False
        for tree in self.trees:
            if not tree.delta.empty:
                copier = tree.copy(self.begin)
                copier.finish(tree.delta, tree.index)
                copier.flush()
            tree.index = settled(tree.index, self.at_ns, self.unsettled)
        return True

    def close(self) -> None:
        """Close what is open."""
        for tree in self.trees:
            tree.close()

    def save(
        self, directory: str, base: Sequence[str], layers: Sequence[str], *, lasting: bool
    ) -> None:
        """Remember the state that was captured, which these layers show.

        Args:
            directory: The directory of the sandbox.
            base: The layers that its upper layers are stacked on.
            layers: The layers that show the state.
            lasting: A snapshot has the state.
        """
        captured = _Captured(
            base=list(base),
            layers=list(layers),
            tops=[_identity(tree.top) for tree in self.trees],
            indexes=tree_index.dump([tree.index for tree in self.trees]),
        )
        path = os.path.join(directory, _LASTING if lasting else _BRANCHED)
        with open(f"{path}.part", "wb") as file:
            file.write(msgspec.msgpack.encode(captured))
        os.rename(f"{path}.part", path)
        if lasting:
            _remove(directory, _BRANCHED)


def is_untouched(top: int, base: str) -> bool:
    """Return whether an open directory is empty, and has the attributes of another."""
    if os.listdir(top):
        return False
    with closing(os.open(base, LIST | os.O_CLOEXEC)) as fd:
        return _attributes(top) == _attributes(fd)


def _attributes(fd: int) -> tuple[int, int, int, dict[str, bytes]]:
    found = os.fstat(fd)
    xattrs = {name: value for name, value in xattrs_of(fd).items() if not name.startswith(OVERLAY)}
    return found.st_mode, found.st_uid, found.st_gid, xattrs


def load_state(
    directory: str,
    base: Sequence[str],
    targets: int,
    canonical: Callable[[Sequence[str]], tuple[str, ...]],
    complete: Callable[[Sequence[str]], bool],
) -> CaptureState:
    """Return the latest captured state of a sandbox whose index is still of its upper layers.

    Args:
        directory: The directory of the sandbox.
        base: The layers that its upper layers are stacked on.
        targets: The number of upper layers.
        canonical: Returns the layers that a stack of them was merged to.
        complete: Returns whether all layers of a stack exist.
    """
    for name in (_BRANCHED, _LASTING):
        found = _load(directory, name, base, targets, canonical)
        if found is not None and complete(found.layers):
            return found
    # All files are copied then.
    return CaptureState(tuple(base))


def _load(
    directory: str,
    name: str,
    base: Sequence[str],
    targets: int,
    canonical: Callable[[Sequence[str]], tuple[str, ...]],
) -> CaptureState | None:
    try:
        with open(os.path.join(directory, name), "rb") as file:
            captured = msgspec.msgpack.decode(file.read(), type=_Captured)
        tops = []
        for number in range(targets):
            path = os.path.join(directory, "data/upper", str(number))
            with closing(os.open(path, LIST | os.O_CLOEXEC)) as fd:
                tops.append(_identity(fd))
        if captured.tops != tops or canonical(captured.base) != canonical(base):
            return None
        return CaptureState(canonical(captured.layers), tree_index.load(captured.indexes))
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def forget_state(directory: str) -> None:
    """Remove the captured state of a sandbox whose upper layers are replaced."""
    for name in (_BRANCHED, _LASTING):
        _remove(directory, name)


def _remove(directory: str, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, name))


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def check_room(folder: str, size: int, *, used: int, limit: int | None) -> None:
    """Raise if a layer of that size is too much for the sandbox, or for the disk.

    Args:
        folder: A directory of the file system.
        size: Bytes of the layer.
        used: Bytes that the sandbox and its snapshots use.
        limit: Disk limit of the sandbox.
    """
    if limit is not None and used + size > limit:
        raise LimitReached(
            f"the sandbox and its snapshots use {used} bytes of disk, and another snapshot needs "
            f"{size} more: the limit is {limit}.",
            hint="Delete snapshots that are not needed, or raise the limit: "
            "limits={'disk': '16GB'}.",
            limit="disk",
        )
    if available_bytes(folder) < size:
        raise StorageFull(
            folder,
            f"the host's disk has no room for a snapshot of {size} bytes.",
            hint="Free disk space, for example by deleting snapshots or sandboxes.",
        )
