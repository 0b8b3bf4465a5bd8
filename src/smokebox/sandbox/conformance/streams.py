"""Cases on streamed output: live, in order, complete, and bounded in memory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities

MEGABYTE = 1_000_000
HUNDRED_MB = 100 * MEGABYTE
PRINT_100_MB = "i=0; while [ $i -lt 100 ]; do cat megabyte; i=$((i+1)); done"


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if unknown."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


class StreamCases(Cases):
    """`exec_stream`, and long output of `exec`."""

    async def test_chunks_are_the_whole_output(self, sandbox: SandboxApi) -> None:
        stream = sandbox.exec_stream("echo a; echo b >&2; printf c; exit 3")
        chunks = [chunk async for chunk in stream]
        assert "".join(c.data for c in chunks if c.stream == "stdout") == "a\nc"
        assert "".join(c.data for c in chunks if c.stream == "stderr") == "b\n"
        assert (stream.exit_code, stream.result.success) == (3, False)

    async def test_stream_of_a_silent_command(self, sandbox: SandboxApi) -> None:
        stream = sandbox.exec_stream("true")
        assert [chunk async for chunk in stream] == []
        assert stream.result.success

    async def test_partial_line_arrives_before_the_end(self, sandbox: SandboxApi) -> None:
        started = time.monotonic()
        async with sandbox.exec_stream("printf partial; sleep 30") as stream:
            chunk = await anext(stream)
            assert chunk.data == "partial"
        assert time.monotonic() - started < 20

    async def test_stdout_and_stderr_keep_their_order(self, sandbox: SandboxApi) -> None:
        script = "for i in 1 2 3; do echo out$i; sleep 0.1; echo err$i >&2; sleep 0.1; done"
        seen = [chunk async for chunk in sandbox.exec_stream(script)]
        assert "".join(c.data for c in seen) == "out1\nerr1\nout2\nerr2\nout3\nerr3\n"
        assert [c.stream for c in seen] == ["stdout", "stderr"] * 3

    async def test_character_split_over_two_writes_is_decoded_whole(
        self, sandbox: SandboxApi
    ) -> None:
        script = r"printf 'a\xc3'; sleep 0.2; printf '\xa9b'; printf '\xff'"
        seen = [chunk async for chunk in sandbox.exec_stream(script)]
        assert "".join(c.data for c in seen) == "aéb\ufffd"
        assert (await sandbox.exec(script)).stdout == "aéb\ufffd"

    async def test_result_is_unavailable_before_the_end(self, sandbox: SandboxApi) -> None:
        async with sandbox.exec_stream("echo x; sleep 30") as stream:
            await anext(stream)
            with pytest.raises(RuntimeError):
                _ = stream.result

    async def test_closing_a_stream_kills_the_command(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        async with sandbox.exec_stream("echo x; sleep 1; touch survived", cwd=directory) as stream:
            await anext(stream)
        await asyncio.sleep(1.5)
        assert await sandbox.readdir(directory) == []

    async def test_closing_an_unread_stream_runs_nothing(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        stream = sandbox.exec_stream("sleep 0.5; touch survived", cwd=directory)
        await stream.aclose()
        await asyncio.sleep(1)
        assert await sandbox.readdir(directory) == []

    async def test_stream_times_out_with_124(self, sandbox: SandboxApi) -> None:
        stream = sandbox.exec_stream("echo hi; sleep 30", timeout=0.5)
        text = "".join([c.data async for c in stream if c.stream == "stdout"])
        assert (stream.exit_code, text) == (124, "hi\n")

    async def test_stream_accepts_stdin_env_and_cwd(
        self, sandbox: SandboxApi, directory: str
    ) -> None:
        stream = sandbox.exec_stream(
            'cat; echo "$A"; pwd', cwd=directory, env={"A": "b"}, stdin="in\n"
        )
        assert "".join([c.data async for c in stream]) == f"in\nb\n{directory}\n"

    async def test_stream_of_100_mb_does_not_grow_memory(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/megabyte", (b"0123456789abcde\n" * 62500))
        before, worst, count = resident_bytes(), 0, 0
        stream = sandbox.exec_stream(PRINT_100_MB, cwd=directory)
        async for chunk in stream:
            count += len(chunk.data)
            worst = max(worst, resident_bytes())
        assert stream.exit_code == 0
        assert stream.result.truncated == (capabilities.max_output is not None)
        assert count == HUNDRED_MB or count == capabilities.max_output
        assert worst - before < 64 * MEGABYTE + 8 * (capabilities.max_output or 0)

    async def test_output_of_100_mb_is_truncated(
        self, sandbox: SandboxApi, capabilities: Capabilities, directory: str
    ) -> None:
        await sandbox.write_file(f"{directory}/megabyte", (b"0123456789abcde\n" * 62500))
        before = resident_bytes()
        result = await sandbox.exec(f"{PRINT_100_MB}; echo end >&2", cwd=directory)
        assert (result.exit_code, result.truncated, result.stderr) == (0, True, "end\n")
        assert result.stdout.startswith("0123456789abcde\n")
        assert MEGABYTE < len(result.stdout) < HUNDRED_MB
        assert resident_bytes() - before < 200 * MEGABYTE
        if result.stdout_file is not None:
            assert (await sandbox.stat(result.stdout_file)).size == HUNDRED_MB

    async def test_slow_reader_gets_all_output(self, sandbox: SandboxApi, directory: str) -> None:
        await sandbox.write_file(f"{directory}/megabyte", (b"0123456789abcde\n" * 62500))
        stream = sandbox.exec_stream("cat megabyte megabyte megabyte", cwd=directory)
        count = 0
        async for chunk in stream:
            count += len(chunk.data)
            await asyncio.sleep(0.001)
        assert count == 3 * MEGABYTE
