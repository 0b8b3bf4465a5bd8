"""SIGKILL of the server while clients of the SDK use it: calls raise, and nothing done is lost.

The server is restarted on the same state directory, as `smokebox up` would.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from killable_server import new_home, run_killable_server
from smokebox import connect
from smokebox.errors import NotFound, ProcessEnded, SandboxGone, ServiceUnavailable
from smokebox.foundation.endpoint import socket_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from smokebox import Client, Sandbox

pytestmark = pytest.mark.timeout(120)

# Errors of a client whose server is gone.
SERVER_GONE = (SandboxGone, ServiceUnavailable)
MEBIBYTE = 1 << 20


class Service:
    """A server that can be killed and restarted, and a client of it."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.client: Client = connect(f"unix:{socket_path(home)}")
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start the server, and wait until it responds."""
        await self._stack.enter_async_context(run_killable_server(self.home))

    async def kill(self) -> None:
        """Kill the server."""
        await self._stack.aclose()


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    with new_home() as home:
        service = Service(home)
        await service.start()
        try:
            yield service
        finally:
            await service.client.aclose()
            await service.kill()


async def test_running_command_raises_and_sandbox_is_adopted(service: Service) -> None:
    sandbox = service.client.sandbox("box")
    await sandbox.write_file("kept", "before")
    running = asyncio.create_task(sandbox.exec("touch started; sleep 60"))
    await _eventually(lambda: sandbox.exists("started"))
    await service.kill()
    with pytest.raises(SERVER_GONE):
        await running
    await service.start()
    assert await sandbox.read_file("kept") == "before"
    # The command of the disconnected client is killed.
    await _eventually(lambda: _no_sleep_process(sandbox))


async def test_running_stream_raises_after_its_output(service: Service) -> None:
    sandbox = service.client.sandbox("box")
    received = []
    with pytest.raises(SERVER_GONE):
        async with sandbox.exec_stream("echo first; sleep 60") as stream:
            async for chunk in stream:
                received.append(chunk.data)
                await service.kill()
    assert received == ["first\n"]


async def test_interrupted_upload_leaves_the_file_unchanged(service: Service) -> None:
    sandbox = service.client.sandbox("box")
    await sandbox.write_file("file", "old")

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(64):
            if number == 8:
                await service.kill()
            yield os.urandom(MEBIBYTE)

    with pytest.raises(SERVER_GONE):
        await sandbox.write_stream("file", pieces())
    await service.start()
    assert await sandbox.read_file("file") == "old"
    assert await sandbox.readdir(".") == ["file"]


async def test_interrupted_download_raises(service: Service) -> None:
    sandbox = service.client.sandbox("box")
    data = os.urandom(MEBIBYTE) * 32
    await sandbox.write_file("file", data)
    with pytest.raises(SERVER_GONE):
        async for _ in sandbox.read_stream("file"):
            await service.kill()
    await service.start()
    digest = hashlib.sha256()
    async for piece in sandbox.read_stream("file"):
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(data).digest()


async def test_process_keeps_running_and_log_resumes_at_cursor(service: Service) -> None:
    sandbox = service.client.sandbox("box")
    count = "i=0; while [ $i -lt 400 ]; do echo $i; i=$((i+1)); sleep 0.01; done"
    process = await sandbox.start_process(count)
    pid = process.pid
    lines: list[str] = []
    cursor = None
    for _ in range(3):
        with contextlib.suppress(*SERVER_GONE):
            async for chunk in process.stream_logs(cursor=cursor):
                lines += chunk.data.splitlines(keepends=True)
                cursor = chunk.cursor
                if len("".join(lines).split()) % 50 == 49:
                    break
        await service.kill()
        await service.start()
    async for chunk in process.stream_logs(cursor=cursor):
        lines.append(chunk.data)
    assert "".join(lines).split() == [str(number) for number in range(400)]
    again = await sandbox.get_process(process.id)
    assert (again.pid, await again.wait_for_exit()) == (pid, 0)


async def test_log_stream_survives_a_restart(service: Service) -> None:
    sandbox = service.client.sandbox("box")
    process = await sandbox.start_process("for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done")
    received: list[str] = []

    async def read() -> None:
        nonlocal received
        async for chunk in process.stream_logs():
            received += [chunk.data]

    reading = asyncio.create_task(read())
    await _eventually(lambda: _has_line(received, "2"))
    await service.kill()
    await service.start()
    await reading
    assert "".join(received).split() == ["1", "2", "3", "4", "5", "6"]


async def test_terminal_ends_with_the_server(service: Service) -> None:
    sandbox = service.client.sandbox("box")
    terminal = await sandbox.create_terminal()
    await terminal.write(b"echo $((40 + 2)); sleep 60\n")
    output = b""
    with pytest.raises(SERVER_GONE):
        async for data in terminal:
            output += data
            if b"42" in output:
                await service.kill()
    await service.start()
    with pytest.raises(NotFound):
        await sandbox.open_terminal(terminal.id)
    await _eventually(lambda: _no_sleep_process(sandbox))


async def test_code_contexts_survive_and_running_code_is_interrupted(
    service: Service,
) -> None:
    sandbox = service.client.sandbox("box")
    context = await sandbox.create_code_context(cwd="/tmp")
    await sandbox.run_code("x = 'kept'\nevents = []", context=context)
    endless = (
        "import time\nopen('/workspace/started', 'w').close()\n"
        "try:\n    while True: time.sleep(0.01)\nexcept KeyboardInterrupt: events.append('stopped')"
    )
    running = asyncio.create_task(sandbox.run_code(endless, context=context))
    await _eventually(lambda: sandbox.exists("started"))
    await service.kill()
    with pytest.raises(SERVER_GONE):
        await running
    await service.start()
    assert [one.id for one in await sandbox.list_code_contexts()] == [context.id]
    result = await sandbox.run_code("x, events", context=context)
    assert (result.text, result.count, result.stdout) == ("('kept', ['stopped'])", 3, "")


async def test_interrupted_context_creation_leaves_a_working_context_or_none(
    service: Service,
) -> None:
    sandbox = service.client.sandbox("box")
    await sandbox.wake()
    for pause in (0.0, 0.01, 0.03, 0.06):
        creating = asyncio.create_task(sandbox.create_code_context())
        await asyncio.sleep(pause)
        await service.kill()
        await asyncio.wait({creating})
        creating.exception()
        await service.start()
        for context in await sandbox.list_code_contexts():
            with contextlib.suppress(ProcessEnded):
                result = await sandbox.run_code("1", context=context, timeout=15)
                assert result.text == "1"
    assert (await sandbox.run_code("'works'")).text == "'works'"


async def _eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.02)


async def _has_line(received: list[str], line: str) -> bool:
    return line in "".join(received).split()


async def _no_sleep_process(sandbox: Sandbox) -> bool:
    result = await sandbox.exec("pgrep -x sleep || true")
    return not result.stdout.strip()
