"""Messages between a virtual sandbox and its worker process, in MessagePack.

Nothing from a worker is unpickled: a compromised worker can only send data to its parent.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from smokebox.errors import SmokeboxError
from smokebox.sandbox.virtual.snapshot import FileNode  # noqa: TC001
from smokebox.types import OutputChunk  # noqa: TC001
from smokebox.wire.failure import Failure, failure_of

if TYPE_CHECKING:
    import socket

T = TypeVar("T")

_LENGTH = struct.Struct("!Q")
MAX_MESSAGE = 4 << 30


class WorkerState(msgspec.Struct):
    """Files, directory and environment of a sandbox, as of its last finished call.

    `shell` is the state of a shell from a snapshot, for a worker that has not run it yet.
    """

    image: dict[str, FileNode] = {}
    unloaded: dict[str, str] = {}
    shell: bytes = b""
    cwd: str | None = None
    env: dict[str, str] = {}


class StateChanges(msgspec.Struct):
    """Changes of the state by one call; `nodes` are files that were created or changed."""

    nodes: dict[str, FileNode]
    removed: list[str]
    unloaded: dict[str, str]
    cwd: str
    env: dict[str, str]


class WorkerCall(msgspec.Struct, tag=True, kw_only=True):
    """A call of the parent. `id` numbers the calls of one worker."""

    id: int = 0


class StartWorker(WorkerCall):
    """Create the sandbox. `settings` is a pickled `VirtualSettings`, `path` is `sys.path`."""

    path: list[bytes]
    settings: bytes
    state: WorkerState | None


class RunScript(WorkerCall):
    """Run a script, and send its output while it runs if `streamed`."""

    command: str
    cwd: str | None
    env: dict[str, str]
    stdin: bytes | None
    timeout: float | None
    streamed: bool


class CallFiles(WorkerCall):
    """Call a method of the sandbox's `Tree`."""

    operation: str
    arguments: list[Any]
    options: dict[str, Any]


class TakeSnapshot(WorkerCall):
    """Return a snapshot as bytes."""


class RestoreSnapshot(WorkerCall):
    """Restore a snapshot."""

    snapshot: bytes


class CancelCall(WorkerCall):
    """Cancel the call of this id, which still gets a response."""


class WorkerReply(msgspec.Struct, tag=True, kw_only=True):
    """A message of the worker about the call of an id."""

    id: int


class CallAccepted(WorkerReply):
    """The worker has started the call."""


class ScriptOutput(WorkerReply):
    """A chunk of a streamed script."""

    chunk: OutputChunk


class CallResponse(WorkerReply):
    """Result or error of a call. A cancelled call has neither.

    `abandoned` is set once a script of the worker could not be stopped.
    """

    result: Any = None
    error: Failure | None = None
    abandoned: bool = False
    changes: StateChanges | None = None


AnyCall = StartWorker | RunScript | CallFiles | TakeSnapshot | RestoreSnapshot | CancelCall
AnyReply = CallAccepted | ScriptOutput | CallResponse
CALLS: msgspec.msgpack.Decoder[AnyCall] = msgspec.msgpack.Decoder(AnyCall)
REPLIES: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: WorkerCall | WorkerReply) -> bytes:
    """Encode a message with its length in front."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Receive a message from a blocking socket.

    Raises:
        EOFError: The connection was closed.
        ValueError: The message is invalid.
    """
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > MAX_MESSAGE:
        raise ValueError("the message is too long")
    return decoder.decode(_receive_exactly(connection, size))


def pack_error(error: Exception) -> Failure:
    """Return an exception as plain data, for `smokebox.wire.failure.error_of`."""
    if not isinstance(error, SmokeboxError):
        error = SmokeboxError(f"{type(error).__name__}: {error}")
    return failure_of(error)


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, position = memoryview(data), 0
    while position < size:
        count = connection.recv_into(view[position:])
        if count == 0:
            raise EOFError("connection closed")
        position += count
    return data
