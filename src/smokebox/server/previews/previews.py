"""The previews of one server: the state that their connections share, and their listener."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING

from smokebox.foundation.http1.pool import ConnectionPool
from smokebox.server.previews.access import PreviewAccess, TokenSigner
from smokebox.server.previews.names import PreviewNames
from smokebox.server.previews.proxy import PreviewProxy
from smokebox.tenancy.connections import CountedConnection, refusal

if TYPE_CHECKING:
    from smokebox.engine import Host
    from smokebox.server.health import Drain
    from smokebox.server.metrics import Metrics
    from smokebox.server.settings import ServerSettings
    from smokebox.tenancy.connections import ConnectionLimits
    from smokebox.tenancy.keys import Keys
    from smokebox.tenancy.running_requests import RunningRequests

_MAX_IDLE = 64
_IDLE_CHECK_SECONDS = 5.0
_IDLE_SECONDS = 60.0
_CUT_CHECK_SECONDS = 0.2
_BACKLOG = 2048
_LOOPBACK = "127.0.0.1"
_PORT_FILE = "previews.port"


class Previews:
    """State of all previews. `port` is their TCP port, once there is one."""

    def __init__(
        self,
        *,
        host: Host,
        settings: ServerSettings,
        keys: Keys,
        drain: Drain,
        metrics: Metrics,
        connections: ConnectionLimits,
        running: RunningRequests,
    ) -> None:
        self.names = PreviewNames(settings)
        self.signer = TokenSigner(settings.home)
        self.access = PreviewAccess(host, keys, self.signer)
        self.keys = keys
        self.drain = drain
        self.connections = connections
        self.running = running
        self.head_seconds = settings.head_timeout
        self.timeout = settings.preview_timeout
        self.pool = ConnectionPool(max_idle=_MAX_IDLE)
        self.proxies: set[PreviewProxy] = set()
        self.port: int | None = None
        self.count = metrics.previewed
        self._port_file = os.path.join(settings.home, _PORT_FILE)
        self._listening = asyncio.Lock()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._idle_check: asyncio.TimerHandle | None = None

    @property
    def draining(self) -> bool:
        """True once new requests are refused."""
        return self.drain.begun

    def start(self, port: int | None) -> None:
        """Start; `port` is that of the server, if it listens on TCP."""
        self.port = port
        self._close_idle()

    async def listen(self) -> int:
        """Return the TCP port of previews, listening on a loopback port if the server has none.

        It is the port of the last run if that is free, so that URLs stay the same.
        """
        async with self._listening:
            if self.port is None:
                sock = await asyncio.to_thread(_bind, self._port_file)
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(
                    lambda: _PreviewConnection(self), sock=sock, backlog=_BACKLOG
                )
                self.port = sock.getsockname()[1]
            return self.port

    async def resume(self) -> None:
        """Listen again if an earlier run did."""
        if self.port is None and await asyncio.to_thread(os.path.exists, self._port_file):
            with contextlib.suppress(OSError):
                await self.listen()

    async def finish(self, seconds: float) -> None:
        """Wait for responses on their way, at most `seconds`, then close."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.drain.cut and any(one.is_responding for one in self.proxies):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        # `drain.cut` sets no event.
                        async with asyncio.timeout(_CUT_CHECK_SECONDS):
                            await self._changed.wait()
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        if self._idle_check is not None:
            self._idle_check.cancel()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = [proxy.task for proxy in self.proxies]
        for proxy in list(self.proxies):
            proxy.cut()
        if tasks:
            await asyncio.wait(tasks)
        self.pool.close()

    def remove(self, proxy: PreviewProxy) -> None:
        """Forget a connection that ended."""
        self.proxies.discard(proxy)
        self._changed.set()

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle_check = loop.call_later(_IDLE_CHECK_SECONDS, self._close_idle)
        now = loop.time()
        for proxy in list(self.proxies):
            longest = _IDLE_SECONDS if proxy.has_responded else self.head_seconds
            if proxy.idle_since is not None and now - proxy.idle_since > longest:
                proxy.close()


class _PreviewConnection(CountedConnection):
    """A connection to the listener of previews, which no other requests reach."""

    def __init__(self, previews: Previews) -> None:
        super().__init__(previews.connections)
        self._previews = previews

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        error = self._previews.connections.add(transport)
        if error is None:
            PreviewProxy(self._previews, self)
        else:
            self.write(refusal(error))
            self.close()


def _bind(port_file: str) -> socket.socket:
    last = 0
    with contextlib.suppress(OSError, ValueError), open(port_file) as text:
        last = int(text.read())
    try:
        sock = socket.create_server((_LOOPBACK, last), backlog=_BACKLOG)
    except (OSError, OverflowError):
        sock = socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = sock.getsockname()[1]
    if port != last:
        with open(port_file, "w") as text:
            text.write(f"{port}\n")
    return sock
