"""Raw output of commands, without and within a session."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.engine import Host, Sandbox
    from smokebox.engine.sessions.session import ShellSession
    from smokebox.runtime.stream import ByteStream

NOT_TEXT = bytes(range(256)) + b"\xff\xc3\x00\xed\xa0\x80\xf0\x9f"
PRINT_NOT_TEXT = "printf '" + "".join(f"\\x{byte:02x}" for byte in NOT_TEXT) + "'"


@pytest.fixture(params=["stateless", "session"])
async def target(request: pytest.FixtureRequest, host: Host) -> tuple[Sandbox, ShellSession | None]:
    """A sandbox, and the session to run commands in, if any."""
    sandbox = host.sandbox("bytes")
    return sandbox, await sandbox.create_session() if request.param == "session" else None


async def read_all(stream: ByteStream) -> tuple[bytes, bytes]:
    """Return the whole stdout and stderr of a command."""
    parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    async with stream:
        async for piece in stream:
            parts[piece.stream].append(piece.data)
    return b"".join(parts["stdout"]), b"".join(parts["stderr"])


async def test_bytes_that_are_not_text_are_unchanged(
    target: tuple[Sandbox, ShellSession | None],
) -> None:
    sandbox, session = target
    stream = sandbox.exec_bytes(f"{PRINT_NOT_TEXT}; {PRINT_NOT_TEXT} >&2; exit 3", session=session)
    assert await read_all(stream) == (NOT_TEXT, NOT_TEXT)
    assert (stream.exit_code, stream.result.stdout, stream.result.stderr) == (3, "", "")


async def test_split_character_arrives_as_written(
    target: tuple[Sandbox, ShellSession | None],
) -> None:
    sandbox, session = target
    command = r"printf 'a\xc3'; while [ ! -e go ]; do sleep 0.01; done; printf '\xa4z'"
    pieces = []
    async with sandbox.exec_bytes(command, cwd="/tmp", timeout=15, session=session) as stream:
        async for piece in stream:
            pieces.append(tuple(piece))
            await sandbox.write_file("/tmp/go", "")
    assert pieces == [("stdout", b"a\xc3"), ("stdout", b"\xa4z")]


async def test_text_stream_never_splits_a_character(
    target: tuple[Sandbox, ShellSession | None],
) -> None:
    sandbox, session = target
    command = r"printf 'a\xc3'; while [ ! -e go ]; do sleep 0.01; done; printf '\xa4z\xc3'"
    texts = []
    async with sandbox.exec_stream(command, cwd="/tmp", timeout=15, session=session) as stream:
        async for chunk in stream:
            texts.append(chunk.data)
            await sandbox.write_file("/tmp/go", "")
    assert texts == ["a", "äz", "\N{REPLACEMENT CHARACTER}"]


async def test_fifty_megabytes_arrive_complete(target: tuple[Sandbox, ShellSession | None]) -> None:
    sandbox, session = target
    command = "seq 1 9000000 | head -c 50000000 | tee >(sha256sum >&2); sleep 0.1; wait $!"
    digest, checksum = hashlib.sha256(), b""
    async with sandbox.exec_bytes(command, timeout=18, session=session) as stream:
        async for piece in stream:
            if piece.stream == "stdout":
                digest.update(piece.data)
            else:
                checksum += piece.data
    assert stream.exit_code == 0
    assert checksum.split()[0].decode() == digest.hexdigest()


async def test_timeout_keeps_partial_output(target: tuple[Sandbox, ShellSession | None]) -> None:
    sandbox, session = target
    stream = sandbox.exec_bytes(r"printf '\xff\xc3'; sleep 1011", timeout=1, session=session)
    out, err = await read_all(stream)
    assert out == b"\xff\xc3"
    # Bash may report the terminated command before that.
    assert err.endswith(b"smokebox: timed out after 1 s\n")
    assert (stream.exit_code, stream.result.timed_out) == (124, True)


async def test_closing_the_stream_kills_the_command(
    target: tuple[Sandbox, ShellSession | None],
) -> None:
    sandbox, session = target
    async with sandbox.exec_bytes("echo on; exec sleep 1012", session=session) as stream:
        async for piece in stream:
            assert piece.data == b"on\n"
            break
    async with asyncio.timeout(10):
        while (await sandbox.exec(["pgrep", "-xf", "sleep 1012"])).success:
            await asyncio.sleep(0.02)


async def test_options_are_those_of_exec(
    target: tuple[Sandbox, ShellSession | None],
) -> None:
    sandbox, session = target
    command = 'cat; printf "%s %s" "$PWD" "$WORD"'
    stream = sandbox.exec_bytes(
        command, cwd="/tmp", env={"WORD": "set"}, stdin=NOT_TEXT, session=session
    )
    assert await read_all(stream) == (NOT_TEXT + b"/tmp set", b"")


async def test_missing_program_is_a_result(host: Host) -> None:
    stream = host.sandbox("bytes").exec_bytes(["no-such-program"])
    assert await read_all(stream) == (b"", b"smokebox: no-such-program: command not found\n")
    assert stream.exit_code == 127


async def test_end_of_the_shell_is_reported(host: Host) -> None:
    sandbox = host.sandbox("bytes")
    session = await sandbox.create_session()
    stream = sandbox.exec_bytes("printf out; exit 4", session=session.name)
    assert await read_all(stream) == (b"out", b"")
    assert (stream.exit_code, stream.result.session_ended) == (4, True)


def test_user_cannot_change_within_a_session(host: Host) -> None:
    with pytest.raises(InvalidOption, match="user cannot be changed within a session"):
        host.sandbox("bytes").exec_bytes("true", user="nobody", session="s")
