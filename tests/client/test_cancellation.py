"""Cancelled calls raise CancelledError, whatever the server responds meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest

from client.scripted_server import response, scripted_server
from smokebox import connect
from smokebox.errors import Forbidden, LimitReached
from smokebox.types import ExecResult, SandboxInfo
from smokebox.wire.failure import FailureResponse, failure_of, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from smokebox import Sandbox
    from smokebox.errors import SmokeboxError

LONG = "x" * (3 << 20)
# The first part of a response: the request waits for the rest until it is cancelled.
NOTHING_YET = b"HTTP/1.1"
WRITTEN = response(200, b'{"bytes":3145728}')
CREATED = response(
    200,
    msgspec.json.encode(
        SandboxInfo(
            id="box",
            status="active",
            image="",
            tier="namespaces",
            limits={},
            enforcement=None,
            labels={},
            generation=1,
            created_at=0.0,
            last_active_at=0.0,
            sleep_after=None,
            keep_alive=False,
            ephemeral=False,
            cwd="/workspace",
            user="root",
            stop_reason=None,
        )
    ),
    connection="close",
)


def refusal(error: SmokeboxError) -> bytes:
    body = msgspec.json.encode(FailureResponse(failure_of(error, "r1")))
    return response(status_of(type(error)), body, connection="close")


REFUSED = refusal(LimitReached("too many requests."))


async def exec_with_long_stdin(box: Sandbox) -> object:
    return await box.exec("wc -c", stdin=LONG)


async def write_stream(box: Sandbox) -> object:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)

    return await box.write_stream("large", pieces())


@contextlib.asynccontextmanager
async def refusing_server(path: Path) -> AsyncIterator[None]:
    """Run a server that creates sandboxes, and refuses all else before its body is read."""
    tasks: list[asyncio.Task[object] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            created = head.startswith(b"PUT /api/sandboxes/box HTTP")
            writer.write(CREATED if created else REFUSED)
            while await reader.read(1 << 16):
                pass
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    async with server:
        yield
    await asyncio.gather(*filter(None, tasks))


async def cancel_after(steps: int, work: Awaitable[object]) -> bool:
    """Cancel a task after some iterations of the event loop; False if it has ended before."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    if not task.cancel():
        # It may end with the refusal, which is not looked at.
        task.exception()
        return False
    with pytest.raises(asyncio.CancelledError):
        await task
    return True


@pytest.mark.parametrize("call", [exec_with_long_stdin, write_stream])
async def test_refusal_does_not_replace_cancellation(
    tmp_path: Path, call: Callable[[Sandbox], Awaitable[object]]
) -> None:
    path, steps = tmp_path / "s", 0
    async with refusing_server(path), connect(f"unix:{path}") as client:
        box = client.sandbox("box")
        with pytest.raises(LimitReached):
            await call(box)
        while await cancel_after(steps, call(box)):
            steps += 1
    assert steps > 5


async def test_exec_ends_when_cancelled_while_the_file_of_its_stdin_cannot_be_removed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    async with (
        scripted_server(str(path), CREATED, WRITTEN, NOTHING_YET, REFUSED) as server,
        connect(f"unix:{path}") as client,
    ):
        task = asyncio.ensure_future(exec_with_long_stdin(client.sandbox("box")))
        while "POST /api/sandboxes/box/exec" not in server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert server.requests[-1].startswith("DELETE /api/sandboxes/box/files?path=")


async def test_result_is_returned_when_the_file_of_its_stdin_cannot_be_removed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    ran = ExecResult(exit_code=0, stdout="3145728\n")
    done = response(200, msgspec.json.encode(ran))
    refused = refusal(Forbidden("the key may not remove files."))
    async with (
        scripted_server(str(path), CREATED, WRITTEN, done, refused),
        connect(f"unix:{path}") as client,
    ):
        result = await exec_with_long_stdin(client.sandbox("box"))
    assert result == ran
