"""Capture of the upper layers of a sandbox as a layer, while it runs or sleeps.

The files that changed since the capture before are copied while programs run. Then the programs
are frozen, what changed meanwhile is copied, and they go on. The index of the captured state stays
beside the upper layers, for the next capture.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from smokebox.engine.disk import available_bytes
from smokebox.engine.files.descriptors import LIST, closing
from smokebox.engine.snapshots import tree_index
from smokebox.engine.snapshots.delta import Delta, compare
from smokebox.engine.snapshots.layer_writer import LayerWriter
from smokebox.engine.snapshots.tree_index import TreeIndex, scan, settled
from smokebox.errors import LimitReached, StorageFull

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The latest state that a snapshot has, and the latest of all, if that is a later one: its layers
# go with the forks that it was captured for.
_LASTING, _BRANCHED = "captured", "branched"
# So few files are copied while programs are frozen.
_AT_ONCE_FILES, _AT_ONCE_BYTES = 16, 1 << 20


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
class Capture:
    """A capture under way: of the upper layers below `uppers`, into the directory `target`."""

    uppers: str
    target: str
    targets: Sequence[str]
    before: CaptureState
    writers: list[LayerWriter] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    indexes: list[TreeIndex] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """True if nothing changed since the capture before."""
        return all(delta.empty for delta in self.deltas)

    @property
    def size(self) -> int:
        """Bytes of the new layer."""
        return sum(delta.disk for delta in self.deltas)

    @property
    def used(self) -> int:
        """Bytes of the upper layers."""
        linked = {
            (n, one.inode): one.disk for n, all in enumerate(self.indexes) for one in all.values()
        }
        return sum(linked.values())

    @property
    def files(self) -> int:
        """Number of files in the new layer."""
        return sum(len(delta.files) for delta in self.deltas)

    def open(self) -> None:
        """Open the upper layers, which exist for a sandbox that ever ran."""
        for number in range(len(self.targets)):
            path = os.path.join(self.uppers, str(number))
            self.tops.append(os.open(path, LIST | os.O_NOFOLLOW | os.O_CLOEXEC))

    def copy_ahead(self, pids: Callable[[], list[int]], check: Callable[[Capture], None]) -> None:
        """Copy what changed since the capture before, while programs run."""
        settled_ns = tree_index.now_ns() - tree_index.TICK_NS
        unsettled = tree_index.mapped_inodes(pids())
        self._compare(None)
        check(self)
        if self.files > _AT_ONCE_FILES or self.size > _AT_ONCE_BYTES:
            self._make_writers()
            for writer, top, delta in zip(self.writers, self.tops, self.deltas, strict=True):
                writer.copy_ahead(top, delta, unsettled, settled_ns)

    def finish(self, pids: Callable[[], list[int]], check: Callable[[Capture], None]) -> None:
        """Copy the rest while nothing changes."""
        at, unsettled = tree_index.now_ns(), tree_index.mapped_inodes(pids())
        opened: list[dict[str, int]] = [{} for _ in self.tops]
        try:
            self._compare(opened)
            self._copy_rest(check)
        finally:
            for top, modes in zip(self.tops, opened, strict=True):
                tree_index.close_again(top, modes)
        self.indexes = [settled(index, at, unsettled) for index in self.indexes]

    def _copy_rest(self, check: Callable[[Capture], None]) -> None:
        if self.empty:
            return
        check(self)
        self._make_writers()
        parts = zip(self.writers, self.tops, self.deltas, self.indexes, strict=True)
        # Mounts of a sandbox are limited: a tree without changes is not one of them.
        self.changed = [
            "" if delta.empty else target
            for delta, target in zip(self.deltas, self.targets, strict=True)
        ]
        for writer, top, delta, index in parts:
            # The attributes of the top come from the uppermost layer.
            delta.directories = {"": delta.directories.get("", False), **delta.directories}
            writer.finish(top, delta, index)

    def flush(self) -> None:
        """Write the layer to the disk."""
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        """Close what is open."""
        for writer in self.writers:
            writer.close()
        for top in self.tops:
            os.close(top)

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
            tops=[_identity(top) for top in self.tops],
            indexes=tree_index.dump(self.indexes),
        )
        path = os.path.join(directory, _LASTING if lasting else _BRANCHED)
        with open(f"{path}.part", "wb") as file:
            file.write(msgspec.msgpack.encode(captured))
        os.rename(f"{path}.part", path)
        if lasting:
            _remove(directory, _BRANCHED)

    def _compare(self, opened: list[dict[str, int]] | None) -> None:
        self.indexes = [
            scan(top, None if opened is None else opened[number])
            for number, top in enumerate(self.tops)
        ]
        before = self.before.indexes
        self.deltas = [
            compare(before[number] if before is not None else None, index)
            for number, index in enumerate(self.indexes)
        ]

    def _make_writers(self) -> None:
        for number in range(len(self.writers), len(self.tops)):
            self.writers.append(LayerWriter(os.path.join(self.target, str(number))))


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
