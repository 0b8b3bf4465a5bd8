"""The previews of one server: what their connections share, and their listener of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING

from smokebox.server.previews.gate import Gate
from smokebox.server.previews.gate import unknown as _unknown
from smokebox.server.previews.signing import Signer
from smokebox.server.previews.sites import Sites
from smokebox.server.previews.upstream import Pool
from smokebox.server.previews.visitor import Visitor

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from smokebox.engine import Host
    from smokebox.server.health import Drain
    from smokebox.server.keys import Keys
    from smokebox.server.metrics import Metrics
    from smokebox.server.settings import ServerSettings

_SWEEP_SECONDS = 5.0
_IDLE_SECONDS = 60.0
_HURRY_SECONDS = 0.2
_BACKLOG = 2048
_LOOPBACK = "127.0.0.1"
_PORT_FILE = "previews.port"


class Previews:
    """What is shared. `port` is where they are reached by TCP, once they are."""

    def __init__(
        self, *, host: Host, settings: ServerSettings, keys: Keys, drain: Drain, metrics: Metrics
    ) -> None:
        self.sites = Sites(settings)
        self.signer = Signer(settings.home)
        self.gate = Gate(host, keys, self.signer)
        self.keys = keys
        self.drain = drain
        self.pool = Pool()
        self.visitors: set[Visitor] = set()
        self.port: int | None = None
        self.unknown = _unknown
        self.count = metrics.previews.count
        self._file = os.path.join(settings.home, _PORT_FILE)
        self._listening = asyncio.Lock()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.drain.begun

    def start(self, port: int | None) -> None:
        """Begin; `port` is that of the server, if it listens by TCP."""
        self.port = port
        self._sweep()

    async def listen(self) -> int:
        """The port where previews are, on the loopback address unless the server has its own.

        It is the one of last time, if that is free: URLs stay what they are.
        """
        async with self._listening:
            if self.port is None:
                sock = await asyncio.to_thread(_bind, self._file)
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(
                    lambda: Visitor(self), sock=sock, backlog=_BACKLOG
                )
                self.port = sock.getsockname()[1]
            return self.port

    async def resume(self) -> None:
        """Listen again, if there were previews before."""
        if self.port is None and await asyncio.to_thread(os.path.exists, self._file):
            with contextlib.suppress(OSError):
                await self.listen()

    async def finish(self, seconds: float) -> None:
        """Let the answers that are on their way arrive, and end the rest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.drain.cut and any(one.answering for one in self.visitors):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        # Now and then, to see whether anybody is in a hurry.
                        async with asyncio.timeout(_HURRY_SECONDS):
                            await self._changed.wait()
        await self.aclose()

    async def aclose(self) -> None:
        """End all connections."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for visitor in list(self.visitors):
            visitor.abort()
        self.pool.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Have something done that no connection can wait for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ended(self) -> None:
        """Of `Visitor`: an answer has arrived, or a connection ended."""
        self._changed.set()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep)
        self.pool.sweep()
        late = loop.time() - _IDLE_SECONDS
        for visitor in [one for one in self.visitors if one.idle and one.used_at < late]:
            visitor.close()


def _bind(file: str) -> socket.socket:
    wanted = 0
    with contextlib.suppress(OSError, ValueError), open(file) as text:
        wanted = int(text.read())
    try:
        sock = socket.create_server((_LOOPBACK, wanted), backlog=_BACKLOG)
    except (OSError, OverflowError):
        sock = socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = sock.getsockname()[1]
    if port != wanted:
        with open(file, "w") as text:
            text.write(f"{port}\n")
    return sock
