"""Messages between a sandbox and its worker: whole, typed, and nothing but data."""

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
from smokebox.sandbox.virtual.image import Node
from smokebox.sandbox.virtual.messages import (
    Message,
    pack_error,
    pack_nodes,
    pack_value,
    receive,
    unpack_error,
    unpack_nodes,
    unpack_value,
)
from smokebox.types import FileInfo


def _sent(message: Message) -> Message:
    return receive(io.BytesIO(message.encode()).read)


def test_a_message_arrives_as_it_was_sent() -> None:
    message = Message({"a": [1, "é"], "b": None}, [b"", b"\x00\xff", b"x" * 100_000])
    assert _sent(message) == message


@pytest.mark.parametrize(
    "value", [b"\xff", b"", ["a", "é"], True, None, FileInfo(path="/a", type="file", size=3)]
)
def test_values_keep_their_type(value: object) -> None:
    assert unpack_value(_sent(pack_value(value))) == value


def test_files_keep_everything() -> None:
    nodes = {
        "/d": Node("directory", 0o755, 1.5),
        "/d/f": Node("file", 0o600, 2.25, b"\x00\xff"),
        "/l": Node("symlink", 0o777, 3.0, b"d/f"),
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
    there = unpack_error(_sent(Message({"error": pack_error(error)})).header["error"])
    assert type(there) is type(error)
    assert (str(there), there.fields) == (str(error), error.fields)


def test_another_exception_becomes_ours() -> None:
    there = unpack_error(pack_error(ZeroDivisionError("division by zero")))
    assert type(there) is SmokeboxError
    assert "ZeroDivisionError" in str(there)


def test_an_error_nobody_knows_becomes_the_root() -> None:
    assert type(unpack_error({"code": "martian", "message": "m"})) is SmokeboxError


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(EOFError):
        receive(io.BytesIO(b"\xff" * 12).read)
