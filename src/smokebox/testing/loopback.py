"""A server of ours on the loopback, for the time of a block."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Self

from aiohttp import web

from smokebox.sandbox.background_loop import BackgroundLoop

if TYPE_CHECKING:
    from types import TracebackType

_LARGEST = 256 * 1024 * 1024


class LoopbackServer(abc.ABC):
    """Listens for as long as the block lasts, on a thread of its own by `with`.

    What it answers its `routes` say; `_origin` is where it listens.
    """

    _origin = ""
    _runner: web.AppRunner | None = None
    _thread: BackgroundLoop | None = None

    @abc.abstractmethod
    def routes(self, router: web.UrlDispatcher) -> None:
        """Say who answers what."""

    async def start(self, port: int = 0) -> None:
        """Listen, on a free port unless one is given."""
        app = web.Application(client_max_size=_LARGEST)
        self.routes(app.router)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        host, bound = self._runner.addresses[0][:2]
        self._origin = f"http://{host}:{bound}"

    async def stop(self) -> None:
        """Listen no more, and let go of who waits."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        self._thread = BackgroundLoop()
        self._thread.run(self.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.run(self.__aexit__(kind, error, trace))
            self._thread.close()
            self._thread = None
