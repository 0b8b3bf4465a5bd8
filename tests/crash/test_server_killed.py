"""kill -9 of the server while clients use it: they hear of it, and lose nothing that was done.

The clients are those of the SDK, whose server is started again by hand on the same state
directory, as `smokebox up` would.
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

# What a client may hear of a server that is no more. Both say what to do next.
LOST = (SandboxGone, ServiceUnavailable)
MEBIBYTE = 1 << 20


class Service:
    """A server that can be killed and started again, and a client of it."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.client: Client = connect(f"unix:{socket_path(home)}")
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Serve the state directory, and return when it answers."""
        await self._stack.enter_async_context(run_killable_server(self.home))

    async def kill(self) -> None:
        """SIGKILL."""
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


async def test_a_command_under_way_raises_and_the_sandbox_is_there_again(service: Service) -> None:
    box = service.client.sandbox("box")
    await box.write_file("kept", "before")
    running = asyncio.create_task(box.exec("touch begun; sleep 60"))
    await _until(lambda: box.exists("begun"))
    await service.kill()
    with pytest.raises(LOST):
        await running
    await service.start()
    assert await box.read_file("kept") == "before"
    # What was started for a caller that is gone is gone too.
    await _until(lambda: _no_sleeper(box))


async def test_a_stream_under_way_raises_after_what_was_written(service: Service) -> None:
    box = service.client.sandbox("box")
    heard = []
    with pytest.raises(LOST):
        async with box.exec_stream("echo first; sleep 60") as stream:
            async for chunk in stream:
                heard.append(chunk.data)
                await service.kill()
    assert heard == ["first\n"]


async def test_an_upload_under_way_leaves_the_file_as_it_was(service: Service) -> None:
    box = service.client.sandbox("box")
    await box.write_file("file", "old")

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(64):
            if number == 8:
                await service.kill()
            yield os.urandom(MEBIBYTE)

    with pytest.raises(LOST):
        await box.write_stream("file", pieces())
    await service.start()
    assert await box.read_file("file") == "old"
    assert await box.readdir(".") == ["file"]


async def test_a_download_under_way_is_never_taken_for_whole(service: Service) -> None:
    box = service.client.sandbox("box")
    data = os.urandom(MEBIBYTE) * 32
    await box.write_file("file", data)
    with pytest.raises(LOST):
        async for _ in box.read_stream("file"):
            await service.kill()
    await service.start()
    whole = hashlib.sha256()
    async for piece in box.read_stream("file"):
        whole.update(piece)
    assert whole.digest() == hashlib.sha256(data).digest()


async def test_a_process_runs_on_and_its_log_goes_on_at_the_cursor(service: Service) -> None:
    box = service.client.sandbox("box")
    count = "i=0; while [ $i -lt 400 ]; do echo $i; i=$((i+1)); sleep 0.01; done"
    process = await box.start_process(count)
    pid = process.pid
    lines: list[str] = []
    cursor = None
    for _ in range(3):
        with contextlib.suppress(*LOST):
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
    again = await box.get_process(process.id)
    assert (again.pid, await again.wait_for_exit()) == (pid, 0)


async def test_a_reader_of_a_log_notices_nothing_of_a_short_absence(service: Service) -> None:
    box = service.client.sandbox("box")
    process = await box.start_process("for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done")
    heard: list[str] = []

    async def read() -> None:
        async for chunk in process.stream_logs():
            heard[len(heard) :] = [chunk.data]

    reading = asyncio.create_task(read())
    await _until(lambda: _has(heard, "2"))
    await service.kill()
    await service.start()
    await reading
    assert "".join(heard).split() == ["1", "2", "3", "4", "5", "6"]


async def test_a_terminal_ends_with_the_server_and_says_so(service: Service) -> None:
    box = service.client.sandbox("box")
    terminal = await box.create_terminal()
    await terminal.write(b"echo $((40 + 2)); sleep 60\n")
    seen = b""
    with pytest.raises(LOST):
        async for data in terminal:
            seen += data
            if b"42" in seen:
                await service.kill()
    await service.start()
    with pytest.raises(NotFound):
        await box.open_terminal(terminal.id)
    await _until(lambda: _no_sleeper(box))


async def test_code_contexts_are_found_again_and_the_code_under_way_is_interrupted(
    service: Service,
) -> None:
    box = service.client.sandbox("box")
    context = await box.create_code_context(cwd="/tmp")
    await box.run_code("x = 'kept'\nseen = []", context=context)
    endless = (
        "import time\nopen('/workspace/begun', 'w').close()\n"
        "try:\n    while True: time.sleep(0.01)\nexcept KeyboardInterrupt: seen.append('stopped')"
    )
    running = asyncio.create_task(box.run_code(endless, context=context))
    await _until(lambda: box.exists("begun"))
    await service.kill()
    with pytest.raises(LOST):
        await running
    await service.start()
    assert [one.id for one in await box.list_code_contexts()] == [context.id]
    told = await box.run_code("x, seen", context=context)
    assert (told.text, told.count, told.stdout) == ("('kept', ['stopped'])", 3, "")


async def test_a_context_whose_making_was_cut_short_is_whole_or_not_there(
    service: Service,
) -> None:
    box = service.client.sandbox("box")
    await box.wake()
    for pause in (0.0, 0.01, 0.03, 0.06):
        making = asyncio.create_task(box.create_code_context())
        await asyncio.sleep(pause)
        await service.kill()
        await asyncio.wait({making})
        making.exception()
        await service.start()
        for context in await box.list_code_contexts():
            with contextlib.suppress(ProcessEnded):
                told = await box.run_code("1", context=context, timeout=15)
                assert told.text == "1"
    assert (await box.run_code("'well'")).text == "'well'"


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.02)


async def _has(heard: list[str], line: str) -> bool:
    return line in "".join(heard).split()


async def _no_sleeper(box: Sandbox) -> bool:
    result = await box.exec("pgrep -x sleep || true")
    return not result.stdout.strip()
