"""Sessions, processes, terminals, files and watches of a sandbox by the SDK."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import tarfile
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    NotFound,
    PathNotFound,
    ProcessEnded,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox


@pytest_asyncio.fixture
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with await client.create() as sandbox:
        yield sandbox


async def test_session_keeps_state_and_is_passed_by_handle_or_id(sandbox: Sandbox) -> None:
    session = await sandbox.create_session(env={"A": "1"})
    await session.exec("cd /tmp; B=2")
    result = await session.exec("echo $PWD $A $B")
    assert (result.stdout, result.exit_code) == ("/tmp 1 2\n", 0), result
    assert (await sandbox.exec("pwd", session=session)).stdout == "/tmp\n"
    assert (await sandbox.exec("pwd", session=session.id)).stdout == "/tmp\n"
    async with session.exec_stream("pwd") as stream:
        assert [chunk.data async for chunk in stream] == ["/tmp\n"]
    assert (await session.refresh()).cwd == "/tmp"


async def test_session_variables_are_set_and_unset(sandbox: Sandbox) -> None:
    session = await sandbox.create_session("main", env={"A": "1"})
    await session.set_env({"A": None, "C": "3"})
    assert (await session.exec("echo ${A-none} $C")).stdout == "none 3\n"


async def test_sessions_are_found_listed_and_deleted(sandbox: Sandbox) -> None:
    await sandbox.create_session("one")
    with pytest.raises(Conflict):
        await sandbox.create_session("one")
    assert [one.id for one in await sandbox.list_sessions()] == ["one"]
    await (await sandbox.get_session("one")).delete()
    with pytest.raises(NotFound):
        await sandbox.get_session("one")


async def test_process_reports_its_state_from_start_to_end(sandbox: Sandbox) -> None:
    process = await sandbox.start_process("echo up; read line; echo $line; exit 3", stdin=True)
    assert (process.running, process.exit_code, process.command[:7]) == (True, None, "echo up")
    assert process.pid is not None
    assert (await process.wait_for_log("up", timeout=10)).line == "up"
    await process.write_stdin("typed\n")
    assert await process.wait_for_exit(timeout=10) == 3
    logs = await process.logs()
    assert logs.stdout == "up\ntyped\n"
    await process.refresh()
    assert (process.status, process.exit_code) == ("exited", 3)
    assert process.ended_at is not None
    assert process.ended_at >= process.started_at


async def test_log_is_resumed_by_cursor(sandbox: Sandbox) -> None:
    process = await sandbox.start_process("echo one; echo two; sleep 0.2; echo three >&2")
    await process.wait_for_exit()
    chunks = [chunk async for chunk in process.stream_logs()]
    assert {chunk.stream for chunk in chunks} == {"stdout", "stderr"}
    rest = [chunk async for chunk in process.stream_logs(cursor=chunks[0].cursor)]
    assert rest == chunks[1:]
    assert [chunk async for chunk in process.stream_logs(replay=False, follow=False)] == []


async def test_wait_for_log_returns_the_match_with_its_groups(sandbox: Sandbox) -> None:
    process = await sandbox.start_process("echo; echo Listening on PORT 8080; sleep 100")
    match = await process.wait_for_log(re.compile(r"port (\d+)", re.IGNORECASE), timeout=10)
    assert (match.text, match.groups) == ("PORT 8080", ("8080",))
    with pytest.raises(DeadlineExceeded):
        await process.wait_for_log("never", timeout=0.2)
    await process.kill(grace=0)
    with pytest.raises(ProcessEnded):
        await process.wait_for_log("never")


async def test_wait_for_port_by_http_and_tcp(sandbox: Sandbox) -> None:
    process = await sandbox.start_process("python3 -m http.server 8123 --bind 127.0.0.1")
    await process.wait_for_port(8123, timeout=15)
    await process.wait_for_port(8123, mode="tcp", timeout=5)
    await process.kill(grace=0)


async def test_processes_are_listed_killed_and_cleaned_up(sandbox: Sandbox) -> None:
    first = await sandbox.start_process(["sleep", "100"], process_id="first")
    await sandbox.start_process("sleep 100")
    assert len(await sandbox.list_processes()) == 2
    await sandbox.kill_process("first", "KILL")
    assert await first.wait_for_exit(timeout=10) == 137
    assert await sandbox.kill_all_processes(grace=0) == 1
    assert (await sandbox.get_process("first")).status == "killed"
    async with asyncio.timeout(10):
        while await sandbox.list_processes():
            await sandbox.cleanup_processes()
    with pytest.raises(NotFound):
        await first.refresh()


async def test_close_stdin_sends_end_of_file(sandbox: Sandbox) -> None:
    process = await sandbox.start_process("wc -c", stdin=True)
    await process.write_stdin(b"\x00" * 100_000)
    await process.close_stdin()
    assert await process.wait_for_exit(timeout=10) == 0
    assert (await process.logs()).stdout.strip() == "100000"


async def test_terminal_has_a_size_input_and_exit_code(sandbox: Sandbox) -> None:
    terminal = await sandbox.create_terminal(cols=90, rows=20)
    async with terminal:
        await terminal.write("stty size; exit 5\n")
        shown = b"".join([data async for data in terminal])
        assert b"20 90" in shown
        assert await terminal.wait(timeout=10) == 5
    assert (await terminal.refresh()).exit_code == 5


async def test_closed_terminal_can_be_opened_again(sandbox: Sandbox) -> None:
    async with await sandbox.create_terminal(["sh", "-c", "echo first; cat"]) as terminal:
        assert b"first" in await anext(terminal)
    again = await sandbox.open_terminal(terminal.id)
    assert b"first" in await anext(again)
    await again.resize(cols=50, rows=10)
    await again.write("x\n")
    async with asyncio.timeout(10):
        while (await again.refresh()).cols != 50:
            await asyncio.sleep(0.01)
    await again.kill()
    with pytest.raises(NotFound):
        await sandbox.open_terminal(terminal.id)
    assert await sandbox.list_terminals() == []


async def test_output_of_a_terminal_can_be_read_after_wait(sandbox: Sandbox) -> None:
    terminal = await sandbox.create_terminal(["sh", "-c", "seq 1000"])
    assert await terminal.wait(timeout=10) == 0
    shown = b"".join([data async for data in terminal])
    assert shown.split()[-1] == b"1000"
    assert terminal.dropped == 0
    with pytest.raises(ProcessEnded):
        await terminal.write("x")
    await terminal.aclose()


async def test_killed_terminal_is_not_found(sandbox: Sandbox) -> None:
    terminal = await sandbox.create_terminal(["true"])
    await (await sandbox.open_terminal(terminal.id)).kill()
    with pytest.raises(NotFound):
        await terminal.write("x")


async def test_wait_for_a_terminal_times_out(sandbox: Sandbox) -> None:
    async with await sandbox.create_terminal(["sleep", "100"]) as terminal:
        with pytest.raises(DeadlineExceeded):
            await terminal.wait(timeout=0.2)
        await terminal.kill()


async def test_all_file_methods(sandbox: Sandbox) -> None:
    await sandbox.write_file("a/f", "one")
    await sandbox.append_file("a/f", "two")
    await sandbox.copy("a/f", "a/g")
    await sandbox.rename("a/g", "a/h")
    await sandbox.mkdir("b")
    assert await sandbox.move("a/h", "b") == "/workspace/b/h"
    await sandbox.symlink("h", "b/l")
    assert await sandbox.readlink("b/l") == "h"
    await sandbox.chmod("b/h", 0o750)
    await sandbox.chown("b/h", 0)
    await sandbox.touch("b/h", mtime=1000)
    info = await sandbox.stat("b/l")
    assert (info.mode, info.mtime, info.is_symlink, info.size) == (0o750, 1000, True, 6)
    found = await sandbox.list_files("/workspace", recursive=True)
    assert [one.path for one in found][-2:] == ["/workspace/b/h", "/workspace/b/l"]
    assert (await sandbox.disk_usage("/workspace")).files >= 2


async def test_read_stream_of_a_range(sandbox: Sandbox) -> None:
    await sandbox.write_file("f", b"0123456789")

    async def part(offset: int, length: int | None) -> bytes:
        pieces = sandbox.read_stream("f", offset=offset, length=length)
        return b"".join([piece async for piece in pieces])

    assert [await part(*span) for span in ((2, 3), (7, None), (8, 50), (20, 5), (3, 0))] == [
        b"234",
        b"789",
        b"89",
        b"",
        b"",
    ]
    with pytest.raises(InvalidOption):
        await part(-1, None)
    with pytest.raises(PathNotFound):
        await anext(sandbox.read_stream("none", offset=4))


async def test_write_stream_is_all_or_nothing(sandbox: Sandbox) -> None:
    async def pieces(count: int, *, fails: bool) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield bytes(1 << 20)
        if fails:
            raise RuntimeError("broken source")

    assert await sandbox.write_stream("big", pieces(5, fails=False)) == 5 << 20
    with pytest.raises(RuntimeError, match="broken source"):
        await sandbox.write_stream("big", pieces(2, fails=True))
    assert (await sandbox.stat("big")).size == 5 << 20


async def test_archive_is_uploaded_and_downloaded(sandbox: Sandbox) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo("x/y")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    result = await sandbox.upload_tar("/data", packed.getvalue())
    assert (result.files, result.bytes) == (1, 3)
    out = b"".join([piece async for piece in sandbox.download_tar("/data", exclude=["none"])])
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert [name for name in archive.getnames() if name.endswith("y")] == ["x/y"]


async def test_watch_continues_from_a_cursor(sandbox: Sandbox) -> None:
    watch = await sandbox.watch("/workspace")
    await sandbox.write_file("a", "1")
    async with asyncio.timeout(10), watch:
        async for event in watch:
            if event.path == "/workspace/a":
                break
    cursor = watch.cursor
    await sandbox.write_file("b", "1")
    async with asyncio.timeout(10), await sandbox.watch("/workspace", cursor=cursor) as later:
        async for event in later:
            if event.path == "/workspace/b":
                break


async def test_watch_of_a_missing_path_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(PathNotFound):
        await sandbox.watch("/none")


async def test_closing_a_log_stream_leaves_the_process_running(sandbox: Sandbox) -> None:
    process = await sandbox.start_process("while echo on; do sleep 0.01; done")
    async with contextlib.aclosing(process.stream_logs()) as logs:
        async for _ in logs:
            break
    assert (await process.refresh()).status == "running"
    await process.kill(grace=0)
