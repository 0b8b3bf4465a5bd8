"""Stdin of background processes: writing without blocking, and closing it."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from engine.awake_sandbox import AwakeSandbox, open_sandbox
from smokebox.errors import InvalidOption, ProcessEnded, Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[AwakeSandbox]:
    async with open_sandbox(tmp_path) as sandbox:
        yield sandbox


async def test_process_reads_stdin_until_it_is_closed(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(["cat"], stdin=True)
    await process.write_stdin("one\n")
    await process.wait_for_log("one", 5)
    await process.write_stdin(b"\xc3\xa4\n")
    await process.close_stdin()
    await process.close_stdin()
    assert await process.wait_for_exit(5) == 0
    assert (await process.logs()).stdout == "one\nä\n"


async def test_write_larger_than_the_pipe_waits_for_the_reader(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 0.2; wc -c", stdin=True)
    data = b"x" * (3 << 20)
    await asyncio.gather(process.write_stdin(data), process.write_stdin(data))
    await process.close_stdin()
    await process.wait_for_exit(10)
    assert (await process.logs()).stdout.strip() == str(2 * len(data))


async def test_ended_processes_keep_no_descriptor_open(sandbox: AwakeSandbox) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        process = await sandbox.processes.start("read line", stdin=True)
        await process.write_stdin("x\n")
        await process.wait_for_exit(5)
        await process.kill()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_process_without_stdin_refuses_writes(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("cat; sleep 99")
    with pytest.raises(Unsupported, match="no stdin"):
        await process.write_stdin("x")
    with pytest.raises(Unsupported, match="no stdin"):
        await process.close_stdin()


async def test_writing_to_an_ending_process_raises_process_ended(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("echo oops >&2; sleep 0.2; exit 5", stdin=True)
    with pytest.raises(ProcessEnded, match="oops") as caught:
        await process.write_stdin(b"x" * (1 << 20))
    assert caught.value.fields["exit_code"] == 5
    with pytest.raises(ProcessEnded):
        await process.write_stdin("more")


async def test_writing_to_a_closed_stdin_is_refused(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("exec 0<&-; echo up; sleep 99", stdin=True)
    await process.wait_for_log("up", 5)
    with pytest.raises(Unsupported, match="closed"):
        await process.write_stdin("x")
    other = await sandbox.processes.start("cat; sleep 99", stdin=True)
    await other.close_stdin()
    with pytest.raises(Unsupported, match="closed"):
        await other.write_stdin("x")
    with pytest.raises(InvalidOption):
        await (await sandbox.processes.start(["cat"], stdin=True)).write_stdin(7)  # type: ignore[arg-type]


async def test_stdin_can_be_opened_by_name(sandbox: AwakeSandbox) -> None:
    users = ["root", "alice"] if os.geteuid() == 0 else ["root"]
    for user in users:
        process = await sandbox.processes.start(["cat", "/dev/stdin"], stdin=True, user=user)
        await process.write_stdin("by name\n")
        await process.close_stdin()
        assert await process.wait_for_exit(5) == 0
        assert (await process.logs()).stdout == "by name\n"
