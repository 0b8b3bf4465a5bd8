"""Access to a server for commands: a client, sandboxes and processes by id, their output.

Commands import this module at the top, so asyncio and the SDK are imported where used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from smokebox.cli.output import notice, write_chunk
from smokebox.errors import BuildFailed, NotFound
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from smokebox.client.client import Client
    from smokebox.client.process import Process
    from smokebox.client.sandbox import Sandbox
    from smokebox.client.settings import SandboxSettings
    from smokebox.runtime.stream import ExecStream
    from smokebox.types import SandboxInfo


def run_with_client(work: Callable[[Client], Coroutine[Any, Any, int | None]]) -> int:
    """Run `work` with a client of the configured server, and return the exit code.

    SIGTERM and SIGHUP cancel the work, so that its sandbox and terminal are cleaned up.
    """
    import asyncio

    from smokebox.cli.image_progress import ImageProgressPrinter
    from smokebox.client.client import connect
    from smokebox.foundation.signals import handle_signals

    received: list[int] = []
    _announce_start()

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            received.append(number)
            task.cancel()

        with handle_signals((signal.SIGTERM, signal.SIGHUP), end):
            async with connect() as client:
                with ImageProgressPrinter() as printer:
                    client.watch_images(printer.show_image)
                    try:
                        return await work(client) or 0
                    except BuildFailed as error:
                        printer.show_failure(error)
                        raise

    try:
        with asyncio.Runner() as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def _announce_start() -> None:
    """Print a notice if the client will start a server, which takes a moment."""
    from smokebox.client.address import is_listening
    from smokebox.client.client import URL
    from smokebox.foundation.endpoint import default_home, socket_path

    if (
        sys.stderr.isatty()
        and URL not in os.environ
        and not is_listening(socket_path(default_home()))
    ):
        notice("Starting a server in the background ...")


async def sandbox_info(client: Client, id: str) -> SandboxInfo:
    """Return the state of a sandbox. Raises `NotFound` if it does not exist."""
    info = await client.sandbox(id).info()
    if info is None:
        raise NotFound(
            f"there is no sandbox {id!r}.",
            hint=f"`smokebox create {id}` creates it, `smokebox ls` lists all.",
            kind="sandbox",
            name=id,
        )
    return info


async def find_sandbox(client: Client, id: str, *, create: bool = False) -> Sandbox:
    """Return the sandbox of that id, which must exist unless `create` is set.

    A handle alone would create it, and so would a mistyped id.
    """
    if not create:
        await sandbox_info(client, id)
    return client.sandbox(id)


async def find_process(sandbox: Sandbox, id: str) -> Process:
    """Return a process of a sandbox by its id."""
    try:
        return await sandbox.get_process(id)
    except NotFound as error:
        error.hint = f"`smokebox ps {sandbox.id}` lists its processes."
        raise


@contextlib.asynccontextmanager
async def temporary_sandbox(client: Client, settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    """Create a sandbox for the block and destroy it afterwards, also on errors and signals."""
    # The id is chosen here, so that a creation that was interrupted can be undone too.
    sandbox = client.sandbox(new_id("run"), **settings)
    try:
        yield sandbox
    finally:
        await sandbox.destroy()


async def print_output(running: ExecStream) -> int:
    """Write the output of a command to this process's streams, and return its exit code.

    Cancelling kills the command.
    """
    async with running as output:
        async for chunk in output:
            write_chunk(chunk.stream, chunk.data)
    return running.exit_code
