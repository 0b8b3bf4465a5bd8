"""Servers for the tests of clients: real ones, each on a state directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from smokebox.client import background
from smokebox.client.client import connect
from smokebox.wire.place import log_path, socket_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.client.client import Client

START_SECONDS = 15.0


class Served:
    """A server in a process of its own, which may be killed, stopped and started again."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.url = f"unix:{socket_path(home)}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        os.makedirs(self.home, exist_ok=True)
        serve = [sys.executable, "-m", "smokebox", "serve", "--no-tcp", "--pool", "0"]
        with open(log_path(self.home), "ab") as log:
            self.process = subprocess.Popen(
                [*serve, "--home", self.home], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while background.find(self.home) is None:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)
        # The process that makes its sandboxes runs from here on: no test is blamed for it.
        asyncio.run(self._warm_up())

    async def _warm_up(self) -> None:
        async with await self.client().create():
            pass

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it as its user does, with all that its sandboxes run."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)

    def log(self) -> str:
        """What it has written."""
        with open(log_path(self.home), errors="replace") as file:
            return file.read()

    def client(self) -> Client:
        """A client of it."""
        return connect(self.url)


@contextlib.contextmanager
def served(home: str) -> Iterator[Served]:
    """A server for as long as the block lasts."""
    server = Served(home)
    server.start()
    try:
        yield server
    finally:
        if server.process is None or server.process.poll() is not None:
            # What runs in the sandboxes of a server that was killed is for the next to end.
            server.start()
        server.stop()
