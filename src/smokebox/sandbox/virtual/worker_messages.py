"""Messages between a virtual sandbox and its worker process.

A message is a JSON header and blobs of bytes. Nothing from a worker is unpickled: a compromised
worker can only send data to its parent.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import TYPE_CHECKING, Any

from smokebox.errors import PathError, SmokeboxError
from smokebox.sandbox.virtual.snapshot import FileNode
from smokebox.types import FileInfo

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

_LENGTHS = struct.Struct("!IQ")
MAX_MESSAGE = 4 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerMessage:
    """Header with its blobs."""

    header: dict[str, Any]
    blobs: Sequence[bytes] = ()

    def encode(self) -> bytes:
        """Encode for the socket."""
        header = {**self.header, "blobs": [len(blob) for blob in self.blobs]}
        text = json.dumps(header, default=str).encode()
        lengths = _LENGTHS.pack(len(text), sum(header["blobs"]))
        return b"".join((lengths, text, *self.blobs))


def receive(read: Callable[[int], bytes]) -> WorkerMessage:
    """Receive a message; `read` returns exactly as many bytes as asked, or raises `EOFError`."""
    header_size, body_size = _LENGTHS.unpack(read(_LENGTHS.size))
    if header_size + body_size > MAX_MESSAGE:
        raise EOFError("invalid message")
    header = json.loads(read(header_size))
    body, blobs, at = read(body_size), [], 0
    for size in header.pop("blobs"):
        blobs.append(body[at : at + size])
        at += size
    return WorkerMessage(header, blobs)


def reader_of(connection: socket.socket) -> Callable[[int], bytes]:
    """Return a function that reads exactly `size` bytes from a blocking socket."""

    def read(size: int) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = connection.recv_into(view[at:])
            if count == 0:
                raise EOFError("connection closed")
            at += count
        return bytes(data)

    return read


def pack_error(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data."""
    if not isinstance(error, SmokeboxError):
        return {"code": "error", "message": f"{type(error).__name__}: {error}"}
    packed = {"code": error.code, "message": error.message, "hint": error.hint}
    if isinstance(error, PathError):
        return {**packed, "path": error.path}
    return {**packed, "fields": error.fields}


def unpack_error(packed: Mapping[str, Any]) -> SmokeboxError:
    """Return the exception that `pack_error` packed, as the same class."""
    kind = _by_code(SmokeboxError).get(packed["code"], SmokeboxError)
    message, hint = str(packed["message"]), str(packed.get("hint", ""))
    if issubclass(kind, PathError):
        return kind(str(packed.get("path", "")), message, hint=hint)
    return kind(message, hint=hint, **packed.get("fields", {}))


def _by_code(kind: type[SmokeboxError]) -> dict[str, type[SmokeboxError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found.update(_by_code(child))
    return found


def pack_value(value: object) -> WorkerMessage:
    """Pack the result of a file call."""
    if isinstance(value, bytes):
        return WorkerMessage({"kind": "bytes"}, [value])
    if isinstance(value, FileInfo):
        return WorkerMessage({"kind": "info", "value": dataclasses.asdict(value)})
    return WorkerMessage({"kind": "plain", "value": value})


def unpack_value(message: WorkerMessage) -> Any:
    """Unpack the result of a file call."""
    kind = message.header["kind"]
    if kind == "bytes":
        return message.blobs[0]
    value = message.header["value"]
    return FileInfo(**value) if kind == "info" else value


def pack_nodes(nodes: Mapping[str, FileNode]) -> WorkerMessage:
    """Pack files with their contents."""
    rows = [[path, node.kind, node.mode, node.mtime] for path, node in nodes.items()]
    return WorkerMessage({"nodes": rows}, [node.data for node in nodes.values()])


def unpack_nodes(rows: Iterable[Sequence[Any]], blobs: Sequence[bytes]) -> dict[str, FileNode]:
    """Unpack files with their contents."""
    return {
        path: FileNode(kind, mode, mtime, data)
        for (path, kind, mode, mtime), data in zip(rows, blobs, strict=True)
    }
