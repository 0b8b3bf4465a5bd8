"""Snapshots: files and shell state of a sandbox as self-contained bytes.

A fixed header holds the format, its version, and a digest of the rest, which is the files and the
shell state in MessagePack. Mounts, options and credentials are not included.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from smokebox.errors import BadSnapshot, InvalidPath, PathNotFound
from smokebox.foundation.paths import resolve
from smokebox.sandbox.filesystems.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from smokebox.sandbox.filesystems.filesystem import Filesystem
    from smokebox.types import FileInfo


MAGIC = b"smokebox"
VERSION = 2

_HEADER = struct.Struct("!8sH16s")
# bashkit creates the contents of this directory itself.
_DEVICES = "/dev"


@dataclass(frozen=True, slots=True)
class FileNode:
    """File with its bytes, symlink with its target as bytes, or directory."""

    kind: Literal["file", "directory", "symlink"]
    mode: int
    mtime: float
    data: bytes = b""


class _Content(msgspec.Struct):
    shell: bytes
    image: dict[str, FileNode]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Files of a sandbox, and the state of its shell if it has one.

    `unloaded` maps files whose loader has not run yet to the loader's name. It is used only between
    sandboxes with the same settings; encoded snapshots hold the content of every file.
    """

    image: Mapping[str, FileNode]
    shell: bytes = b""
    unloaded: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Encode as bytes."""
        body = msgspec.msgpack.encode(_Content(self.shell, dict(self.image)))
        return _HEADER.pack(MAGIC, VERSION, _digest(body)) + body

    @staticmethod
    def decode(data: bytes) -> Snapshot:
        """Decode bytes.

        Raises:
            BadSnapshot: `encode` did not produce them, or another version of it did.
        """
        body = _checked_body(data)
        try:
            content = msgspec.msgpack.decode(body, type=_Content)
            if any(resolve(path, "/") != path for path in content.image):
                raise ValueError("a path is not normalized")
        except (msgspec.MsgspecError, InvalidPath, ValueError) as error:
            raise BadSnapshot(
                f"the content of the snapshot is invalid: {error}.", hint="Take another snapshot."
            ) from error
        return Snapshot(image=content.image, shell=content.shell)


def _checked_body(data: bytes) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise BadSnapshot(
            f"a snapshot must be bytes, not {type(data).__name__}.",
            hint="Pass what snapshot() returned.",
        )
    data = bytes(data)
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise BadSnapshot("these bytes are not a snapshot.", hint="Pass what snapshot() returned.")
    _, version, digest = _HEADER.unpack_from(data)
    if version != VERSION:
        raise BadSnapshot(
            f"this snapshot has version {version}; version {VERSION} can be restored.",
            hint="Restore it with the release of Smokebox that made it.",
            version=version,
        )
    body = data[_HEADER.size :]
    if _digest(body) != digest:
        raise BadSnapshot("the snapshot is truncated or damaged.", hint="Use an intact copy.")
    return body


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def read_nodes(filesystem: Filesystem, *, without: Container[str] = ()) -> dict[str, FileNode]:
    """Return everything in a filesystem by path, parents first, except `without`."""
    return {
        info.path: node_at(filesystem, info)
        for info in walk_entries(filesystem)
        if info.path not in without
    }


def walk_entries(filesystem: Filesystem) -> Iterator[FileInfo]:
    """Yield the metadata of everything in a filesystem, parents first, without devices."""
    for info in Tree(filesystem).walk("/"):
        if info.type != "other" and not info.path.startswith(_DEVICES + "/"):
            yield info


def node_at(filesystem: Filesystem, info: FileInfo) -> FileNode:
    """Return the node for metadata from `walk_entries`, with its content."""
    mode, mtime = info.mode or 0, info.mtime or 0.0
    if info.is_symlink:
        return FileNode("symlink", mode, mtime, filesystem.readlink(info.path).encode())
    if info.is_directory:
        return FileNode("directory", mode, mtime)
    return FileNode("file", mode, mtime, filesystem.read(info.path))


def write_nodes(filesystem: Filesystem, image: Mapping[str, FileNode]) -> None:
    """Make a filesystem hold exactly the nodes of an image."""
    present = {info.path: info for info in walk_entries(filesystem)}
    for path, info in present.items():
        node = image.get(path)
        if path != _DEVICES and (node is None or node.kind != info.type):
            _remove(filesystem, path)
    for path, node in image.items():
        _write_node(filesystem, path, node)
    for path, node in image.items():
        # Last: adding a child changes the directory's time.
        if node.kind != "symlink":
            filesystem.touch(path, node.mtime)


def _remove(filesystem: Filesystem, path: str) -> None:
    try:
        filesystem.remove(path, recursive=True)
    except PathNotFound:
        # Removed with its parent directory.
        return


def _write_node(filesystem: Filesystem, path: str, node: FileNode) -> None:
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
