"""The files of a filesystem as plain data: taken out of one, put into another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.errors import PathNotFound
from smokebox.sandbox.filesystems.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from smokebox.sandbox.filesystems.filesystem import Filesystem
    from smokebox.types import FileInfo

# What is in it belongs to the engine, which makes it by itself.
_DEVICES = "/dev"


@dataclass(frozen=True, slots=True)
class Node:
    """A file with its bytes, a symlink with its target as bytes, or a directory."""

    kind: Literal["file", "directory", "symlink"]
    mode: int
    mtime: float
    data: bytes = b""


def take(filesystem: Filesystem, *, without: Container[str] = ()) -> dict[str, Node]:
    """Everything in a filesystem by path, parents first, less what is to be left out."""
    return {
        info.path: node_at(filesystem, info)
        for info in survey(filesystem)
        if info.path not in without
    }


def survey(filesystem: Filesystem) -> Iterator[FileInfo]:
    """What is in a filesystem, parents first, without contents and without devices."""
    for info in Tree(filesystem).walk("/"):
        if info.type != "other" and not info.path.startswith(_DEVICES + "/"):
            yield info


def node_at(filesystem: Filesystem, info: FileInfo) -> Node:
    """What `survey` saw, with its content."""
    mode, mtime = info.mode or 0, info.mtime or 0.0
    if info.is_symlink:
        return Node("symlink", mode, mtime, filesystem.readlink(info.path).encode())
    if info.is_directory:
        return Node("directory", mode, mtime)
    return Node("file", mode, mtime, filesystem.read(info.path))


def put(filesystem: Filesystem, image: Mapping[str, Node]) -> None:
    """Make a filesystem hold exactly what an image does."""
    present = {info.path: info for info in survey(filesystem)}
    for path, info in present.items():
        node = image.get(path)
        if path != _DEVICES and (node is None or node.kind != info.type):
            _remove(filesystem, path)
    for path, node in image.items():
        _put_one(filesystem, path, node)
    for path, node in image.items():
        # Last: whatever is put into a directory touches it.
        if node.kind != "symlink":
            filesystem.touch(path, node.mtime)


def _remove(filesystem: Filesystem, path: str) -> None:
    try:
        filesystem.remove(path, recursive=True)
    except PathNotFound:
        # It went with the directory above it.
        return


def _put_one(filesystem: Filesystem, path: str, node: Node) -> None:
    if node.kind == "symlink":
        if filesystem.peek(path) is not None:
            filesystem.remove(path)
        filesystem.symlink(node.data.decode(), path)
        return
    if node.kind == "directory":
        if filesystem.peek(path) is None:
            filesystem.mkdir(path)
    else:
        filesystem.write(path, node.data)
    filesystem.chmod(path, node.mode)
