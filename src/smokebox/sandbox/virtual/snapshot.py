"""Snapshots: a sandbox's files and shell as bytes that stand by themselves.

A header of fixed length names the format, its version, and a digest of the rest; then come
the length of a table in JSON, the table, the state of the shell, and the files one after
another. Mounts, options and credentials are no part of it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.errors import BadSnapshot
from smokebox.sandbox.paths import resolve
from smokebox.sandbox.virtual.image import Node

if TYPE_CHECKING:
    from collections.abc import Mapping

MAGIC = b"smokebox"
VERSION = 1

_HEADER = struct.Struct("!8sH16s")
_LENGTH = struct.Struct("!Q")
_KINDS = ("file", "directory", "symlink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a sandbox, and the state of its shell where it had one.

    `waiting` has the files that nobody has read yet, by the name they had at first. Only
    who makes sandboxes from settings can use it: as bytes, a snapshot has every file whole.
    """

    image: Mapping[str, Node]
    shell: bytes = b""
    waiting: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes."""
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
        """From bytes; raises `BadSnapshot` for anything that `encode` did not make."""
        body = _checked_body(data)
        try:
            (length,) = _LENGTH.unpack_from(body)
            start = _LENGTH.size + length
            return _read(json.loads(body[_LENGTH.size : start]), body[start:])
        except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
            raise BadSnapshot(
                "the table of the snapshot makes no sense.", hint="Take another snapshot."
            ) from error


def _checked_body(data: bytes) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise BadSnapshot(
            f"a snapshot is bytes, not {type(data).__name__}.",
            hint="Pass what snapshot() returned.",
        )
    data = bytes(data)
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise BadSnapshot("these bytes are no snapshot.", hint="Pass what snapshot() returned.")
    _, version, digest = _HEADER.unpack_from(data)
    if version != VERSION:
        raise BadSnapshot(
            f"this snapshot has version {version}; version {VERSION} can be restored.",
            hint="Restore it with the release of Smokebox that made it.",
            version=version,
        )
    body = data[_HEADER.size :]
    if _digest(body) != digest:
        raise BadSnapshot("the snapshot is cut short or damaged.", hint="Use a copy that is whole.")
    return body


def _read(table: Mapping[str, Any], rest: bytes) -> Snapshot:
    at = int(table["shell"])
    shell, image = rest[:at], {}
    for path, kind, mode, mtime, size in table["files"]:
        if kind not in _KINDS or resolve(path, "/") != path or not 0 <= size <= len(rest) - at:
            raise ValueError(path)
        image[path] = Node(kind, mode, mtime, rest[at : at + size])
        at += size
    if at != len(rest):
        raise ValueError("bytes are left over")
    return Snapshot(image=image, shell=shell)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
