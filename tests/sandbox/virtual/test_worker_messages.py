"""Messages between a sandbox and its worker are complete, typed, and plain data."""

from __future__ import annotations

import io

import pytest

from smokebox.errors import (
    InvalidOption,
    PathNotFound,
    SandboxGone,
    SmokeboxError,
    StorageFull,
)
from smokebox.sandbox.virtual.snapshot import FileNode
from smokebox.sandbox.virtual.worker_messages import (
    WorkerMessage,
    pack_error,
    pack_nodes,
    pack_value,
    receive,
    unpack_error,
    unpack_nodes,
    unpack_value,
)
from smokebox.types import FileInfo


def _sent(message: WorkerMessage) -> WorkerMessage:
    return receive(io.BytesIO(message.encode()).read)


def test_messages_round_trip() -> None:
    message = WorkerMessage({"a": [1, "é"], "b": None}, [b"", b"\x00\xff", b"x" * 100_000])
    assert _sent(message) == message


@pytest.mark.parametrize(
    "value", [b"\xff", b"", ["a", "é"], True, None, FileInfo(path="/a", type="file", size=3)]
)
def test_values_round_trip_with_their_type(value: object) -> None:
    assert unpack_value(_sent(pack_value(value))) == value


def test_file_entries_round_trip() -> None:
    nodes = {
        "/d": FileNode("directory", 0o755, 1.5),
        "/d/f": FileNode("file", 0o600, 2.25, b"\x00\xff"),
        "/l": FileNode("symlink", 0o777, 3.0, b"d/f"),
    }
    message = _sent(pack_nodes(nodes))
    assert unpack_nodes(message.header["nodes"], message.blobs) == nodes


@pytest.mark.parametrize(
    "error",
    [
        PathNotFound("/nope"),
        StorageFull("/f", "no room.", hint="Remove files."),
        SandboxGone("gone.", hint="Again.", reason="oom"),
        InvalidOption("bad.", option="x", value=3),
    ],
)
def test_errors_arrive_as_the_same_class(error: SmokeboxError) -> None:
    there = unpack_error(_sent(WorkerMessage({"error": pack_error(error)})).header["error"])
    assert type(there) is type(error)
    assert (str(there), there.fields) == (str(error), error.fields)


def test_foreign_exceptions_become_smokebox_errors() -> None:
    there = unpack_error(pack_error(ZeroDivisionError("division by zero")))
    assert type(there) is SmokeboxError
    assert "ZeroDivisionError" in str(there)


def test_an_unknown_error_code_becomes_the_base_class() -> None:
    assert type(unpack_error({"code": "martian", "message": "m"})) is SmokeboxError


def test_an_impossible_message_length_is_refused() -> None:
    with pytest.raises(EOFError):
        receive(io.BytesIO(b"\xff" * 12).read)
