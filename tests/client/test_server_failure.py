"""Calls end with an error if the server dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import pytest

from client.server_process import ServerProcess, server_process
from smokebox import wire
from smokebox.client.client import connect
from smokebox.errors import SandboxGone, ServiceUnavailable
from smokebox.server import responses
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from smokebox.client.sandbox import Sandbox
    from smokebox.types import LogChunk

pytestmark = pytest.mark.timeout(60)
SOON = 10.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Yield a server for one test, to be killed."""
    with server_process(str(tmp_path / "home")) as server:
        yield server


async def run_exec(sandbox: Sandbox) -> object:
    return await sandbox.exec("sleep 100")


async def run_stream(sandbox: Sandbox) -> object:
    return [chunk async for chunk in sandbox.exec_stream("echo on; sleep 100")]


async def run_terminal(sandbox: Sandbox) -> object:
    terminal = await sandbox.create_terminal(["sleep", "100"])
    return [data async for data in terminal]


async def start(
    sandbox: Sandbox, call: Callable[[Sandbox], Awaitable[object]]
) -> asyncio.Task[object]:
    """Start a call and wait until the server has received it."""
    task = asyncio.ensure_future(call(sandbox))
    async with asyncio.timeout(SOON):
        while not (await sandbox.exec("pgrep -x sleep")).stdout:
            await asyncio.sleep(0.01)
    return task


@pytest.mark.parametrize("call", [run_exec, run_stream, run_terminal])
async def test_killed_server_is_noticed_at_once(
    server: ServerProcess, call: Callable[[Sandbox], Awaitable[object]]
) -> None:
    task = await start(server.client().sandbox("box"), call)
    server.kill()
    async with asyncio.timeout(SOON):
        with pytest.raises((SandboxGone, ServiceUnavailable)):
            await task


@pytest.mark.parametrize("call", [run_exec, run_stream, run_terminal])
async def test_hanging_server_is_noticed_by_its_silence(
    server: ServerProcess,
    call: Callable[[Sandbox], Awaitable[object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 3.0)
    task = await start(server.client().sandbox("box"), call)
    server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(SandboxGone, match="connection to the server was lost"):
                await task
    finally:
        server.signal(signal.SIGCONT)


async def test_long_command_does_not_count_as_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 2.0)
    monkeypatch.setattr(responses, "HEARTBEAT", 0.1)
    async with run_server(ServerSettings(home=str(tmp_path / "home"), pool=0)) as server:
        sandbox = connect(f"unix:{server.socket}").sandbox("box")
        assert (await sandbox.exec("sleep 3; echo done")).stdout == "done\n"
        async with sandbox.exec_stream("sleep 3; echo done") as stream:
            assert [chunk.data async for chunk in stream] == ["done\n"]


async def test_log_stream_resumes_after_a_restart_of_the_server(server: ServerProcess) -> None:
    sandbox = server.client().sandbox("box")
    process = await sandbox.start_process(
        "for n in $(seq 200); do echo $n; sleep 0.02; done", process_id="count"
    )
    chunks: list[LogChunk] = []
    async with contextlib.aclosing(process.stream_logs()) as logs:
        async for chunk in logs:
            chunks.append(chunk)
            if len(chunks) == 10:
                server.kill()
                await asyncio.to_thread(server.start)
    assert "".join(chunk.data for chunk in chunks).split() == [str(n + 1) for n in range(200)]


async def test_next_call_works_after_a_restart_of_the_server(server: ServerProcess) -> None:
    sandbox = server.client().sandbox("box")
    await sandbox.write_file("kept", "here")
    server.kill()
    await asyncio.to_thread(server.start)
    assert await sandbox.read_file("kept") == "here"
