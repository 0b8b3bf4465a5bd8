"""Snapshots: files and shell state of a sandbox as self-contained bytes.

A fixed header holds the format, its version, and a digest of the rest; then follow the length of a
JSON table, the table, the shell state, and the files. Mounts, options and credentials are not
included.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from smokebox.errors import BadSnapshot, PathNotFound
from smokebox.foundation.paths import resolve
from smokebox.sandbox.filesystems.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from smokebox.sandbox.filesystems.filesystem import Filesystem
    from smokebox.types import FileInfo


MAGIC = b"smokebox"
VERSION = 1

_HEADER = struct.Struct("!8sH16s")
_LENGTH = struct.Struct("!Q")
_KINDS = ("file", "directory", "symlink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Files of a sandbox, and the state of its shell if it has one.

    `waiting` maps files whose loader has not run yet to the loader's name. It is used only between
    sandboxes with the same settings; encoded snapshots hold every file whole.
    """

    image: Mapping[str, FileNode]
    shell: bytes = b""
    waiting: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Encode as bytes."""
        table = {
            "shell": len(self.shell),
            "files": [
                [path, node.kind, node.mode, node.mtime, len(node.data)]
                for path, node in self.image.items()
            ],
        }
        head = json.dumps(table, separators=(",", ":")).encode()
        parts = [_LENGTH.pack(len(head)), head, self.shell]
        parts += [node.data for node in self.image.values()]
        body = b"".join(parts)
        return _HEADER.pack(MAGIC, VERSION, _digest(body)) + body

    @staticmethod
    def decode(data: bytes) -> Snapshot:
        """Decode bytes; raises `BadSnapshot` for anything that `encode` did not produce."""
        body = _checked_body(data)
        try:
            (length,) = _LENGTH.unpack_from(body)
            start = _LENGTH.size + length
            return _read(json.loads(body[_LENGTH.size : start]), body[start:])
        except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
            raise BadSnapshot(
                "the snapshot has an invalid table.", hint="Take another snapshot."
            ) from error


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


def _read(table: Mapping[str, Any], rest: bytes) -> Snapshot:
    at = int(table["shell"])
    shell, image = rest[:at], {}
    for path, kind, mode, mtime, size in table["files"]:
        if kind not in _KINDS or resolve(path, "/") != path or not 0 <= size <= len(rest) - at:
            raise ValueError(path)
        image[path] = FileNode(kind, mode, mtime, rest[at : at + size])
        at += size
    if at != len(rest):
        raise ValueError("bytes are left over")
    return Snapshot(image=image, shell=shell)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


# bashkit creates the contents of this directory itself.
_DEVICES = "/dev"


@dataclass(frozen=True, slots=True)
class FileNode:
    """File with its bytes, symlink with its target as bytes, or directory."""

    kind: Literal["file", "directory", "symlink"]
    mode: int
    mtime: float
    data: bytes = b""


def take(filesystem: Filesystem, *, without: Container[str] = ()) -> dict[str, FileNode]:
    """Return everything in a filesystem by path, parents first, except `without`."""
    return {
        info.path: node_at(filesystem, info)
        for info in survey(filesystem)
        if info.path not in without
    }


def survey(filesystem: Filesystem) -> Iterator[FileInfo]:
    """Yield the metadata of everything in a filesystem, parents first, without devices."""
    for info in Tree(filesystem).walk("/"):
        if info.type != "other" and not info.path.startswith(_DEVICES + "/"):
            yield info


def node_at(filesystem: Filesystem, info: FileInfo) -> FileNode:
    """Return the node for metadata from `survey`, with its content."""
    mode, mtime = info.mode or 0, info.mtime or 0.0
    if info.is_symlink:
        return FileNode("symlink", mode, mtime, filesystem.readlink(info.path).encode())
    if info.is_directory:
        return FileNode("directory", mode, mtime)
    return FileNode("file", mode, mtime, filesystem.read(info.path))


def put(filesystem: Filesystem, image: Mapping[str, FileNode]) -> None:
    """Make a filesystem hold exactly the nodes of an image."""
    present = {info.path: info for info in survey(filesystem)}
    for path, info in present.items():
        node = image.get(path)
        if path != _DEVICES and (node is None or node.kind != info.type):
            _remove(filesystem, path)
    for path, node in image.items():
        _put_one(filesystem, path, node)
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


def _put_one(filesystem: Filesystem, path: str, node: FileNode) -> None:
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
