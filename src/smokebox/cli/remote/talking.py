"""One conversation with the server: an event loop, a client, and an end at any signal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from smokebox.cli.notice import notice
from smokebox.client.client import URL, Client, connect
from smokebox.client.place import listens
from smokebox.wire.place import default_home, socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def talk(work: Callable[[Client], Coroutine[Any, Any, int | None]]) -> int:
    """Do something with the server, and give the exit code.

    A signal cancels it, so that what it has begun is ended and its terminal is as it was.
    """
    ended_by: list[int] = []
    if sys.stderr.isatty() and URL not in os.environ and not listens(socket_path(default_home())):
        notice("Starting a server in the background ...")

    async def whole() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            ended_by.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end, number)
        async with connect() as client:
            return await work(client) or 0

    try:
        with asyncio.Runner() as runner:
            return runner.run(whole())
    except asyncio.CancelledError:
        if not ended_by:
            raise
        return 128 + ended_by[0]
