"""Logs of background processes: complete, in order, resumable and bounded."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from engine.awake_sandbox import AwakeSandbox, open_sandbox
from smokebox.engine.inotify import watch_log
from smokebox.engine.jail.log_pump import KEEP, STEP, LogPump
from smokebox.engine.processes.logs import MAX_TEXT, ProcessLog, tail
from smokebox.errors import InvalidOption
from smokebox.limits import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.processes.background_process import BackgroundProcess
    from smokebox.types import LogChunk, Stream

# Longer than the time limits of the waits below.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[AwakeSandbox]:
    async with open_sandbox(tmp_path) as sandbox:
        yield sandbox


@pytest.fixture
def log(tmp_path: Path) -> ProcessLog:
    """A log without a process, whose files the test writes."""
    for suffix in (".out", ".err"):
        (tmp_path / f"job{suffix}").touch()
    return ProcessLog(str(tmp_path / "job"))


def write(log: ProcessLog, data: bytes, stream: Stream = "stdout") -> None:
    with open(log.path(stream), "ab") as file:
        file.write(data)


async def read(log: ProcessLog, cursor: str | None = None) -> list[LogChunk]:
    return [chunk async for chunk in log.follow(log.parse_cursor(cursor), follow=False)]


async def follow(process: BackgroundProcess, **options: Any) -> str:
    """Stream the log, and return stdout."""
    chunks = [chunk async for chunk in process.stream_logs(**options)]
    return "".join(chunk.data for chunk in chunks if chunk.stream == "stdout")


async def test_following_a_fast_writer_has_no_gap_or_duplicate(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(["seq", "1", "200000"])
    expected = "".join(f"{number}\n" for number in range(1, 200001))
    assert await follow(process) == expected
    assert (await process.logs()).stdout == expected


async def test_all_followers_get_the_whole_log(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("for i in $(seq 1 300); do echo $i; sleep 0.001; done")

    async def follow_after(delay: float) -> str:
        await asyncio.sleep(delay)
        return await follow(process)

    texts = await asyncio.gather(*(follow_after(number / 50) for number in range(10)))
    assert set(texts) == {"".join(f"{number}\n" for number in range(1, 301))}


async def test_cursor_continues_after_its_chunk(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "for i in $(seq 1 40); do echo o$i; echo e$i >&2; sleep 0.002; done"
    )
    chunks = [chunk async for chunk in process.stream_logs()]
    assert len(chunks) > 2
    whole = await process.logs()
    for index, chunk in enumerate(chunks):
        before = chunks[: index + 1]
        rest = [chunk async for chunk in process.stream_logs(cursor=chunk.cursor)]
        for stream, text in (("stdout", whole.stdout), ("stderr", whole.stderr)):
            assert text == "".join(one.data for one in before + rest if one.stream == stream)


async def test_stdout_and_stderr_are_separate(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("echo out; echo err >&2; exit 1")
    await process.wait_for_exit(30)
    logs = await process.logs()
    assert (logs.stdout, logs.stderr) == ("out\n", "err\n")


async def test_output_is_streamed_while_the_process_runs(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("printf 'name? '; sleep 99")
    async with asyncio.timeout(30):
        chunk = await anext(process.stream_logs())
    assert (chunk.stream, chunk.data) == ("stdout", "name? ")


async def test_without_replay_only_new_output_is_streamed(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("echo old; read; echo fresh", stdin=True)
    await process.wait_for_log("old", 30)
    following = asyncio.create_task(follow(process, replay=False))
    await asyncio.sleep(0.05)
    await process.write_stdin("\n")
    assert await following == "fresh\n"


async def test_without_follow_the_stream_ends_at_the_present(sandbox: AwakeSandbox) -> None:
    # Not `yes`: on a busy machine it writes more than the log keeps before it is read.
    process = await sandbox.processes.start("while :; do echo y; echo y; done")
    await process.wait_for_log("y", 30)
    async with asyncio.timeout(30):
        assert (await follow(process, follow=False)).startswith("y\n")
    assert process.status == "running"


async def test_background_output_does_not_keep_followers_waiting(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("yes & echo done >&2")
    async with asyncio.timeout(30):
        await follow(process)
        assert (await process.logs()).stderr == "done\n"
    await process.kill()


async def test_background_output_after_the_exit_is_kept(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("(sleep 0.3; echo late) & echo early")
    assert await process.wait_for_exit(30) == 0
    assert await follow(process) == "early\n"
    async with asyncio.timeout(30):
        await process.lifetime.tree_ended.wait()
    assert await follow(process) == "early\nlate\n"


async def test_follower_that_stops_early_closes_its_files(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("echo x; sleep 99")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        chunks = process.stream_logs()
        await anext(chunks)
        await chunks.aclose()
    # The start of the process may still be closing descriptors.
    async with asyncio.timeout(30):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)
    assert sandbox.uses == 0


@pytest.mark.parametrize("step", [1, 2, 3, 5])
async def test_text_is_never_split_inside_a_character(log: ProcessLog, step: int) -> None:
    text = "aä€😀\ufffdz" * 3
    chunks: list[LogChunk] = []
    data = text.encode()
    for start in range(0, len(data), step):
        write(log, data[start : start + step])
        chunks += await read(log, chunks[-1].cursor if chunks else None)
    assert "".join(chunk.data for chunk in chunks) == text


async def test_incomplete_character_at_the_end_is_replaced(log: ProcessLog) -> None:
    write(log, "ä".encode()[:1])
    assert await read(log) == []
    log.finish()
    assert [chunk.data for chunk in await read(log)] == ["\ufffd"]


async def test_invalid_utf8_is_replaced(log: ProcessLog) -> None:
    write(log, b"a\xff\xfeb\0c")
    log.finish()
    assert [chunk.data for chunk in await read(log)] == ["a\ufffd\ufffdb\0c"]


@pytest.mark.parametrize("cursor", ["", "x", "1", "-1-0", "0-0-0", "1-0", "0-99", 7, "9" * 40])
async def test_invalid_cursors_are_refused(log: ProcessLog, cursor: Any) -> None:
    with pytest.raises(InvalidOption, match="cursor"):
        await read(log, cursor)


async def test_long_log_keeps_its_end_and_counts_dropped_bytes(sandbox: AwakeSandbox) -> None:
    count = KEEP + 5 * STEP
    process = await sandbox.processes.start(f"yes 123456789abcdef | head -c {count}; echo end")
    assert await process.wait_for_exit(30) == 0
    path = process.log.path("stdout")
    assert os.stat(path).st_size == count + 4
    assert os.stat(path).st_blocks * 512 < KEEP + 2 * STEP
    chunks = [chunk async for chunk in process.stream_logs()]
    assert chunks[0].dropped >= 3 * STEP
    assert str(chunks[0].dropped) in chunks[0].data
    assert chunks[1].data.startswith("123456789abcdef\n" * 100)
    received = sum(len(chunk.data) for chunk in chunks[1:])
    assert (chunks[0].dropped + received, chunks[-1].data[-4:]) == (count + 4, "end\n")


async def test_logs_returns_the_end_of_a_long_log_with_a_note(sandbox: AwakeSandbox) -> None:
    count = (MAX_TEXT + 3000) // 3 * 3
    process = await sandbox.processes.start(f"yes ä | head -c {count}; echo end")
    await process.wait_for_exit(30)
    text = (await process.logs()).stdout
    first, _, rest = text.partition("\n")
    assert first.startswith("[smokebox: 30") and "left out" in first
    assert rest.endswith("ä\nend\n") and "\ufffd" not in rest
    assert len(rest.encode()) <= MAX_TEXT


async def test_truncated_log_is_followed_from_its_end(log: ProcessLog) -> None:
    write(log, b"first\n")
    os.truncate(log.path("stdout"), 0)
    offsets = {"stdout": 6, "stderr": 0}
    following = log.follow(offsets, follow=True)  # type: ignore[arg-type]
    assert "cut" in (await anext(following)).data
    write(log, b"second\n")
    log.finish()
    assert [chunk.data async for chunk in following] == ["second\n"]


async def test_sparse_log_is_read_quickly(log: ProcessLog) -> None:
    write(log, b"start\n")
    os.truncate(log.path("stdout"), 1 << 42)
    write(log, b"end\n")
    chunks = await read(log)
    # The hole begins after the first block.
    assert chunks[0].data.startswith("start\n")
    assert sum(len(chunk.data) for chunk in chunks) < 1 << 20
    assert chunks[-1].data.endswith("end\n")
    assert len(tail(log.path("stdout"), 100)) < 200


async def test_missing_log_is_empty(log: ProcessLog) -> None:
    for stream in ("stdout", "stderr"):
        os.unlink(log.path(stream))
    log.finish()
    assert await read(log) == []
    assert tail(log.path("stdout"), 100) == ""


async def test_program_cannot_damage_its_log_through_stdout(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        [
            "python3",
            "-c",
            "import fcntl, os\n"
            "os.write(1, b'first\\n')\n"
            "for act in (lambda: os.ftruncate(1, 0), lambda: os.lseek(1, 0, 0),\n"
            "            lambda: os.pwrite(1, b'x', 0),\n"
            "            lambda: os.posix_fallocate(1, 0, 1 << 40)):\n"
            "    try:\n"
            "        act(); print('done', flush=True)\n"
            "    except OSError: pass\n"
            "fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)\n"
            "os.write(1, b'last\\n')\n",
        ]
    )
    assert await process.wait_for_exit(30) == 0
    assert (await process.logs()).stdout == "first\nlast\n"


async def test_output_rate_is_limited(sandbox: AwakeSandbox) -> None:
    sandbox.limits = Limits(output_rate=1 << 20)
    started = time.monotonic()
    process = await sandbox.processes.start(["head", "-c", "1000000", "/dev/zero"])
    assert len(await follow(process)) == 1000000
    # The pipe and the first bytes are free.
    assert time.monotonic() - started > 0.4


def test_full_disk_drops_and_counts_output_without_blocking(tmp_path: Path) -> None:
    full, good = (
        os.open("/dev/full", os.O_WRONLY),
        os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT),
    )
    pump = LogPump([full], os.geteuid(), os.getegid(), 0)
    [read], [write] = pump.logs, pump.writers
    for _ in range(100):
        os.write(write, b"x" * 10000)
        assert pump.move(read)
    os.dup2(good, full)
    os.write(write, b"there is room again")
    assert pump.move(read)
    expected = b"\n[smokebox: 1000000 bytes were lost here]\nthere is room again"
    assert os.pread(good, 1000, 0) == expected
    os.close(write)
    assert not pump.move(read)
    for fd in (full, good, read):
        os.close(fd)


async def test_watch_calls_back_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    calls: list[int] = []
    with path.open("w") as file:
        watches = [watch_log(file.fileno(), calls.append) for _ in range(2)]
        for _ in range(3):
            print("x", file=file, flush=True)
        await asyncio.sleep(0.05)
        assert 2 <= len(calls) <= 6
        calls.clear()
        watches[0].close()
        print("y", file=file, flush=True)
        await asyncio.sleep(0.05)
        assert len(calls) == 1
        watches[1].close()
        watches[1].close()
        print("z", file=file, flush=True)
        await asyncio.sleep(0.05)
        assert len(calls) == 1
