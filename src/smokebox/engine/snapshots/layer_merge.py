"""Merging of adjacent layers into one that shows the same files, so that stacks stay short."""

from __future__ import annotations

import contextlib
import os
import posixpath
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import LIST
from smokebox.engine.snapshots.tree_copier import TreeCopier
from smokebox.engine.snapshots.tree_index import close_again, scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.engine.snapshots.tree_index import IndexEntry, TreeIndex


class MergedNode:
    """A file of merged layers, and the number of the layer that it is from."""

    __slots__ = ("children", "entry", "layer", "opaque")

    def __init__(self, layer: int, entry: IndexEntry, *, opaque: bool = False) -> None:
        self.layer = layer
        self.entry = entry
        self.opaque = opaque
        self.children: dict[str, MergedNode] = {}


def merge(indexes: Sequence[TreeIndex]) -> MergedNode:
    """Return the tree that layers show together, the uppermost first, with their whiteouts."""
    lowest = len(indexes) - 1
    top = MergedNode(lowest, indexes[lowest][""])
    for number in range(lowest, -1, -1):
        _apply(top, number, indexes[number])
    return top


def _apply(top: MergedNode, number: int, index: TreeIndex) -> None:
    top.layer, top.entry = number, index[""]
    nodes = {"": top}
    for path, entry in index.items():
        if not path:
            continue
        parent, name = posixpath.split(path)
        siblings = nodes[parent].children
        below = siblings.get(name)
        if not entry.is_directory:
            siblings[name] = MergedNode(number, entry)
            continue
        if below is not None and below.entry.is_directory and not entry.opaque:
            below.layer, below.entry = number, entry
        else:
            # A file below hides directories in the layers under it.
            opaque = entry.opaque or below is not None
            siblings[name] = MergedNode(number, entry, opaque=opaque)
        nodes[path] = siblings[name]


def write_merged(layers: Sequence[str], target: str) -> None:
    """Fill the directory `target` with a layer that shows what others do, the uppermost first."""
    with contextlib.ExitStack() as stack:
        tops, indexes = [], []
        for path in layers:
            tops.append(os.open(path, LIST | os.O_CLOEXEC))
            stack.callback(os.close, tops[-1])
            opened: dict[str, int] = {}
            stack.callback(close_again, tops[-1], opened)
            indexes.append(scan(tops[-1], opened))
        top = merge(indexes)
        writer = TreeCopier(target)
        stack.callback(writer.close)
        _write(writer, tops, top)
        writer.flush()


def _write(writer: TreeCopier, tops: Sequence[int], top: MergedNode) -> None:
    directories = {path: node for path, node in _walk(top) if node.entry.is_directory}
    writer.make_directories(directories)
    for number, source in enumerate(tops):
        files = {
            path: node.entry
            for path, node in _walk(top)
            if node.layer == number and not node.entry.is_directory
        }
        writer.copy_files(source, files)
    # One by one: the attributes of a directory change when those in it are completed.
    for path in reversed(directories):
        node = directories[path]
        writer.copy_directory(tops[node.layer], path, node.entry, opaque=node.opaque)


def _walk(top: MergedNode) -> list[tuple[str, MergedNode]]:
    """Return the files of a tree by path, parents first."""
    found: list[tuple[str, MergedNode]] = [("", top)]
    for path, node in found:
        prefix = f"{path}/" if path else ""
        found += [(prefix + name, child) for name, child in node.children.items()]
    return found
