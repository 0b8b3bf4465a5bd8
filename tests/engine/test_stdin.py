"""The stdin of lasting processes: written to at any time, without blocking, to its end."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from engine.lasting_box import Box, open_box
from smokebox.errors import InvalidOption, ProcessEnded, Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with open_box(tmp_path) as box:
        yield box


async def test_stdin_is_read_line_by_line_until_it_is_closed(box: Box) -> None:
    process = await box.processes.start(["cat"], stdin=True)
    await process.write_stdin("one\n")
    await process.wait_for_log("one", 5)
    await process.write_stdin(b"\xc3\xa4\n")
    await process.close_stdin()
    await process.close_stdin()
    assert await process.wait_for_exit(5) == 0
    assert (await process.logs()).stdout == "one\nä\n"


async def test_more_than_a_pipe_holds_is_written_as_it_is_read(box: Box) -> None:
    process = await box.processes.start("sleep 0.2; wc -c", stdin=True)
    data = b"x" * (3 << 20)
    await asyncio.gather(process.write_stdin(data), process.write_stdin(data))
    await process.close_stdin()
    await process.wait_for_exit(10)
    assert (await process.logs()).stdout.strip() == str(2 * len(data))


async def test_ended_processes_hold_no_descriptor(box: Box) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        process = await box.processes.start("read line", stdin=True)
        await process.write_stdin("x\n")
        await process.wait_for_exit(5)
        await process.kill()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_stdin_of_a_process_without_one_is_refused(box: Box) -> None:
    process = await box.processes.start("cat; sleep 99")
    with pytest.raises(Unsupported, match="no stdin"):
        await process.write_stdin("x")
    with pytest.raises(Unsupported, match="no stdin"):
        await process.close_stdin()


async def test_writing_to_a_process_that_ends_says_so(box: Box) -> None:
    process = await box.processes.start("echo oops >&2; sleep 0.2; exit 5", stdin=True)
    with pytest.raises(ProcessEnded, match="oops") as caught:
        await process.write_stdin(b"x" * (1 << 20))
    assert caught.value.fields["exit_code"] == 5
    with pytest.raises(ProcessEnded):
        await process.write_stdin("more")


async def test_writing_to_a_stdin_that_was_closed_says_so(box: Box) -> None:
    process = await box.processes.start("exec 0<&-; echo up; sleep 99", stdin=True)
    await process.wait_for_log("up", 5)
    with pytest.raises(Unsupported, match="closed"):
        await process.write_stdin("x")
    other = await box.processes.start("cat; sleep 99", stdin=True)
    await other.close_stdin()
    with pytest.raises(Unsupported, match="closed"):
        await other.write_stdin("x")
    with pytest.raises(InvalidOption):
        await (await box.processes.start(["cat"], stdin=True)).write_stdin(7)  # type: ignore[arg-type]
