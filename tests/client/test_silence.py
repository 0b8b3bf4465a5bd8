"""Server that dies or hangs: every call ends with an error that says so."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import pytest

from client.served import Served, served
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
def server(tmp_path: Path) -> Iterator[Served]:
    """Yield a server for one test, to be killed."""
    with served(str(tmp_path / "home")) as server:
        yield server


async def wait(sandbox: Sandbox) -> object:
    return await sandbox.exec("sleep 100")


async def follow(sandbox: Sandbox) -> object:
    return [chunk async for chunk in sandbox.exec_stream("echo on; sleep 100")]


async def look(sandbox: Sandbox) -> object:
    terminal = await sandbox.create_terminal(["sleep", "100"])
    return [data async for data in terminal]


async def begun(
    sandbox: Sandbox, call: Callable[[Sandbox], Awaitable[object]]
) -> asyncio.Task[object]:
    """Start a call and wait until the server has received it."""
    task = asyncio.ensure_future(call(sandbox))
    async with asyncio.timeout(SOON):
        while not (await sandbox.exec("pgrep -x sleep")).stdout:
            await asyncio.sleep(0.01)
    return task


@pytest.mark.parametrize("call", [wait, follow, look])
async def test_a_server_that_is_killed_is_noticed_at_once(
    server: Served, call: Callable[[Sandbox], Awaitable[object]]
) -> None:
    task = await begun(server.client().sandbox("box"), call)
    server.kill()
    async with asyncio.timeout(SOON):
        with pytest.raises((SandboxGone, ServiceUnavailable)):
            await task


@pytest.mark.parametrize("call", [wait, follow, look])
async def test_a_server_that_hangs_is_noticed_when_it_is_silent_for_long(
    server: Served,
    call: Callable[[Sandbox], Awaitable[object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 3.0)
    task = await begun(server.client().sandbox("box"), call)
    server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(SandboxGone, match="went away"):
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


async def test_log_stream_resumes_after_a_restart_of_the_server(server: Served) -> None:
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


async def test_the_next_call_finds_a_server_that_came_back(server: Served) -> None:
    sandbox = server.client().sandbox("box")
    await sandbox.write_file("kept", "here")
    server.kill()
    await asyncio.to_thread(server.start)
    assert await sandbox.read_file("kept") == "here"
