"""Real servers for the tests of clients, each on its own state directory."""

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
from smokebox.foundation.endpoint import log_path, socket_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.client.client import Client

START_SECONDS = 60.0


class ServerProcess:
    """Server in a separate process, which can be killed, stopped and restarted."""

    def __init__(self, home: str, env: Mapping[str, str] | None = None) -> None:
        self.home = home
        self._env = {**os.environ, **(env or {})}
        self.url = f"unix:{socket_path(home)}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it responds."""
        os.makedirs(self.home, exist_ok=True)
        serve = [sys.executable, "-m", "smokebox", "serve", "--no-tcp", "--pool", "0"]
        with open(log_path(self.home), "ab") as log:
            self.process = subprocess.Popen(
                [*serve, "--home", self.home],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
            )
        deadline = time.monotonic() + START_SECONDS
        while background.find(self.home) is None:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)
        # The process that creates its sandboxes starts here, so that no test is blamed for it.
        asyncio.run(self._warm_up())

    async def _warm_up(self) -> None:
        async with await self.client().create():
            pass

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it as `smokebox down` does. After SIGTERM its sandboxes would keep running."""
        assert self.process is not None
        background.stop(self.home)
        self.process.wait(30)

    def log(self) -> str:
        """Return its log."""
        with open(log_path(self.home), errors="replace") as file:
            return file.read()

    def client(self) -> Client:
        """Return a client of it."""
        return connect(self.url)


@contextlib.contextmanager
def server_process(home: str, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run a server within the block, with more variables in its environment."""
    server = ServerProcess(home, env)
    server.start()
    try:
        yield server
    finally:
        if server.process is None or server.process.poll() is not None:
            # Sandboxes of a killed server run until the next server stops them.
            server.start()
        server.stop()
