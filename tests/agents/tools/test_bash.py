"""Tests of the bash tool."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.tools import bash_tool
from smokebox.agents.tools.output import MAX_BYTES_PER_END, MAX_OUTPUT_FILES

if TYPE_CHECKING:
    from pathlib import Path

    from agents.tools.workspace import Workspace
    from smokebox import OutputChunk

KEPT = re.compile(r"The output is in (\S+)\.\]")


async def test_stdout_and_stderr_are_shown(work: Workspace) -> None:
    text = await work.text("bash", command="echo out; echo err >&2")
    assert sorted(text.split("\n")) == ["err", "out"]


async def test_missing_output_is_reported(work: Workspace) -> None:
    assert await work.text("bash", command="true") == "(no output)"


async def test_nonzero_exit_is_a_result_with_its_code(work: Workspace) -> None:
    text = await work.text("bash", command="echo hi; exit 3")
    assert text == "hi\n\nCommand exited with code 3"
    assert "127" in await work.text("bash", command="no-such-program-anywhere")


async def test_leading_whitespace_is_kept(work: Workspace) -> None:
    assert await work.text("bash", command="printf '  x\\n\\n'") == "  x"


async def test_timeout_keeps_partial_output(work: Workspace) -> None:
    text = await work.text("bash", command="echo before; sleep 30; echo after", timeout=0.5)
    assert text.startswith("before\n")
    assert text.endswith("\n\nCommand timed out after 0.5 seconds")
    assert "after\n" not in text


async def test_exit_code_124_is_not_a_timeout(work: Workspace) -> None:
    assert await work.text("bash", command="exit 124") == (
        "(no output)\n\nCommand exited with code 124"
    )


async def test_timeout_above_the_maximum_is_clamped(work: Workspace) -> None:
    tool = bash_tool(work.sandbox, default_timeout=0.1, max_timeout=0.5)
    result = await tool.run({"command": "sleep 30", "timeout": 3600})
    assert "[timeout=3600 is above the maximum; 0.5 seconds were allowed.]" in result.text
    assert result.text.endswith("Command timed out after 0.5 seconds")


async def test_huge_timeout_is_clamped(work: Workspace) -> None:
    text = await work.text("bash", command="echo hi", timeout=10**400)
    assert text.endswith("is above the maximum; 600 seconds were allowed.]")


async def test_default_timeout_applies(work: Workspace) -> None:
    tool = bash_tool(work.sandbox, default_timeout=0.3, max_timeout=0.5)
    assert "timed out after 0.3 s" in (await tool.run({"command": "sleep 30"})).text
    assert "Default 0.3, at most 0.5." in str(tool.schema)


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
async def test_invalid_timeout_is_an_error_result(work: Workspace, timeout: object) -> None:
    assert "'timeout' must be" in await work.error("bash", command="true", timeout=timeout)


@pytest.mark.parametrize("command", ["", "echo a\0b"])
async def test_invalid_command_is_an_error_result(work: Workspace, command: str) -> None:
    assert "command" in await work.error("bash", command=command)


async def test_long_output_shows_its_last_lines_and_is_kept(work: Workspace) -> None:
    text = await work.text("bash", command="seq 5000")
    marker, _, shown = text.partition("\n")
    assert marker.startswith("[Showing the last 2000 of 5000 lines, 10000 of 23893 bytes.")
    assert shown == "\n".join(map(str, range(3001, 5001)))
    path = KEPT.findall(marker)[0]
    assert (await work.text("read", path=path)).startswith("1\n2\n3\n")


async def test_huge_line_shows_its_end(work: Workspace) -> None:
    await work.put(f="€" * 40_000 + "x\n")
    text = await work.text("bash", command="cat f")
    shown = text.partition("\n")[2]
    assert shown == "€" * 17066 + "x"
    assert "51200 of 120002 bytes" in text


async def test_short_line_after_a_huge_one_is_not_shown_alone(work: Workspace) -> None:
    await work.put(f="x" * 80_000 + "\n")
    text = await work.text("bash", command="cat f; echo done")
    assert text.endswith("xxx\ndone")
    assert 51200 <= len(text) < 51500


async def test_output_at_the_limits_is_whole(work: Workspace) -> None:
    await work.put(f="\n".join(["y" * 24] * 2000), g="z" * 51199 + "\n")
    assert len(await work.text("bash", command="cat f")) == 25 * 2000 - 1
    assert await work.text("bash", command="cat g") == "z" * 51199


async def test_vast_output_is_bounded(host: Workspace) -> None:
    command = f"echo first; yes 0123456 | head -c {3 * MAX_BYTES_PER_END}; echo last"
    text = await host.text("bash", command=command)
    assert text.endswith("0123456\nlast")
    kept = await host.sandbox.read_file(KEPT.findall(text)[0])
    assert kept.startswith("first\n0123456\n")
    assert kept.endswith("0123456\nlast\n")
    assert re.search(r"\[\d+ bytes of the output were not kept\.\]", kept)
    assert len(kept) < 2 * MAX_BYTES_PER_END + 100


async def test_old_output_files_are_removed(work: Workspace) -> None:
    paths: list[str] = []
    for _ in range(MAX_OUTPUT_FILES + 2):
        paths += KEPT.findall(await work.text("bash", command="seq 2001"))
    there = [await work.sandbox.exists(path) for path in paths]
    assert there == [False, False] + [True] * MAX_OUTPUT_FILES
    for path in paths:
        await work.sandbox.rm(path, force=True)


async def test_output_is_streamed(work: Workspace) -> None:
    seen: list[OutputChunk] = []
    command = {"command": "echo out; echo err >&2"}
    result = await work.tools["bash"].run(command, on_output=seen.append)
    assert {(chunk.stream, chunk.data) for chunk in seen} == {
        ("stdout", "out\n"),
        ("stderr", "err\n"),
    }
    assert "out" in result.text


async def test_output_arrives_before_the_command_ends(host: Workspace) -> None:
    arrived = asyncio.Event()
    command = {"command": "echo early; until [ -e go ]; do sleep 0.05; done"}
    run = host.tools["bash"].run(command, on_output=lambda chunk: arrived.set())
    task = asyncio.create_task(run)
    async with asyncio.timeout(10):
        await arrived.wait()
        await host.put(go="")
        assert (await task).text == "early"


async def test_exception_in_callback_stops_the_command(host: Workspace, tmp_path: Path) -> None:
    def refuse(chunk: OutputChunk) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await host.tools["bash"].run(
            {"command": "echo $$ >pid; echo x; sleep 60"}, on_output=refuse
        )
    assert not await _lives(host, tmp_path)


async def test_cancellation_kills_the_command(host: Workspace, tmp_path: Path) -> None:
    started = asyncio.Event()
    command = {"command": "echo $$ >pid; echo x; sleep 60"}
    run = host.tools["bash"].run(command, on_output=lambda chunk: started.set())
    task = asyncio.create_task(run)
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await _lives(host, tmp_path)


async def _lives(host: Workspace, folder: Path) -> bool:
    """Return True if the process that wrote its pid is still running after a while."""
    pid = (folder / "pid").read_text().strip()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not (await host.sandbox.exec(f"kill -0 {pid}")).success:
            return False
    return True


async def test_commands_run_concurrently(host: Workspace) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(host.text("bash", command=f"echo {n}")) for n in range(10)]
    assert [task.result() for task in tasks] == [str(n) for n in range(10)]
