"""Messages between a sandbox and its worker process."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

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
    CALLS,
    REPLIES,
    CallFiles,
    CallResponse,
    RunScript,
    StateChanges,
    encode,
    pack_error,
    receive,
)
from smokebox.types import FileInfo
from smokebox.wire.failure import Failure, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_calls_round_trip(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    run = RunScript(
        id=1,
        command="é",
        cwd=None,
        env={"A": "b"},
        stdin=b"\x00\xff" * 500_000,
        timeout=1.5,
        streamed=True,
    )
    write = CallFiles(id=2, operation="write", arguments=["/é", b"\xff"], options={"force": True})
    sender = threading.Thread(target=ours.sendall, args=(encode(run) + encode(write),))
    sender.start()
    assert [receive(theirs, CALLS), receive(theirs, CALLS)] == [run, write]
    sender.join()


@pytest.mark.parametrize("value", [b"\xff", b"", ["a", "é"], True, None])
def test_results_round_trip_with_their_type(value: object) -> None:
    response = REPLIES.decode(encode(CallResponse(id=1, result=value))[8:])
    assert isinstance(response, CallResponse)
    assert response.result == value


def test_changes_round_trip() -> None:
    nodes = {
        "/d": FileNode("directory", 0o755, 1.5),
        "/d/f": FileNode("file", 0o600, 2.25, b"\x00\xff"),
        "/l": FileNode("symlink", 0o777, 3.0, b"d/f"),
    }
    changes = StateChanges(nodes=nodes, removed=["/x"], unloaded={}, cwd="/", env={})
    assert REPLIES.decode(encode(CallResponse(id=1, changes=changes))[8:]) == CallResponse(
        id=1, changes=changes
    )


@pytest.mark.parametrize(
    "error",
    [
        PathNotFound("/nope"),
        StorageFull("/f", "no room.", hint="Remove files."),
        SandboxGone("gone.", hint="Again.", reason="oom"),
        InvalidOption("bad.", option="x", value=3),
    ],
)
def test_errors_round_trip_with_their_class(error: SmokeboxError) -> None:
    response = REPLIES.decode(encode(CallResponse(id=1, error=pack_error(error)))[8:])
    assert isinstance(response, CallResponse)
    assert response.error is not None
    received = error_of(response.error)
    assert type(received) is type(error)
    assert (str(received), received.fields) == (str(error), error.fields)


def test_foreign_exceptions_become_smokebox_errors() -> None:
    received = error_of(pack_error(ZeroDivisionError("division by zero")))
    assert type(received) is SmokeboxError
    assert "ZeroDivisionError" in str(received)


def test_unknown_error_code_becomes_the_base_class() -> None:
    assert type(error_of(Failure(code="unknown", message="m"))) is SmokeboxError


def test_file_info_is_sent_as_a_map() -> None:
    info = FileInfo(path="/a", type="file", size=3)
    response = REPLIES.decode(encode(CallResponse(id=1, result=info))[8:])
    assert isinstance(response, CallResponse)
    assert FileInfo(**response.result) == info


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\0" * 7 + b"\3abc", b"\0" * 7 + b"\1\x80"])
def test_invalid_message_is_refused(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    ours, theirs = pair
    ours.sendall(data)
    with pytest.raises(ValueError, match=r"too long|Expected|missing"):
        receive(theirs, REPLIES)


def test_closed_connection_is_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(b"\0" * 7)
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs, REPLIES)
