"""HTTP server of an app: its socket, its signals and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import signal
from typing import TYPE_CHECKING, cast

import uvicorn

from smokebox.app.asgi import asgi
from smokebox.app.guard import OriginGuard, RequestDrain
from smokebox.errors import SmokeboxError
from smokebox.foundation.embedded_server import EmbeddedServer
from smokebox.foundation.endpoint import listen, url_of
from smokebox.foundation.signals import handle_signals
from smokebox.foundation.tasks import run_until_first
from smokebox.tenancy.http_protocol import CountedWebSocketProtocol, LimitedHttpProtocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from smokebox.app.app import App

PORT = 8600
LOOPBACK = "127.0.0.1"
_CLOSING_SECONDS = 2


async def serve(
    app: App,
    *,
    host: str = LOOPBACK,
    port: int = PORT,
    keys: bool | None = None,
    grace: float | None = None,
    ready: Callable[[str], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then wait for running work.

    Work that does not end in time continues at the next start, and so does work accepted
    meanwhile. A second signal stops at once.

    Args:
        app: The app.
        host: Address to listen on.
        port: Port to listen on, 0 for any free one.
        keys: Require a key for each request. None: only if the app has keys of operators, or if
            `host` is not loopback. Without, a loopback address serves only this user and root, and
            any other address every client.
        grace: Seconds to wait for running work, by default those of the settings.
        ready: Called with the URL once the app is served; may run until it stops.

    """
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def stop(_: signal.Signals) -> None:
        if stopping.is_set():
            hurry.set()
        stopping.set()

    async def run_ready(url: str) -> None:
        if ready is not None:
            await ready(url)
        await asyncio.Event().wait()

    async def drain() -> None:
        await stopping.wait()
        await run_until_first(app.drain(grace), hurry.wait())

    with handle_signals((signal.SIGINT, signal.SIGTERM), stop):
        async with run_app(app, host=host, port=port, keys=keys) as url:
            await run_until_first(run_ready(url), drain())


@contextlib.asynccontextmanager
async def run_app(
    app: App, *, host: str = LOOPBACK, port: int = 0, keys: bool | None = None
) -> AsyncIterator[str]:
    """Run the app on this event loop for the duration of the block, and yield its URL; see
    `serve`.
    """
    required = app.has_operator_keys or not is_loopback(host) if keys is None else keys
    checks_peers = is_loopback(host) and not required
    app.keys = app.open_keys(required=required, checks_peers=checks_peers)
    with contextlib.closing(listen(host, port)) as listener:
        # Started first, so that a file that cannot be opened raises our error.
        await app.start()
        requests = RequestDrain(OriginGuard(asgi(app), host, guarded=checks_peers))
        limits = app.connections
        head_seconds = app.project.settings.head_timeout
        server = EmbeddedServer(
            uvicorn.Config(
                requests,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                http=cast(
                    "type[asyncio.Protocol]",
                    functools.partial(LimitedHttpProtocol, limits, head_seconds),
                ),
                ws=cast(
                    "type[asyncio.Protocol]", functools.partial(CountedWebSocketProtocol, limits)
                ),
                # Open requests have been drained already.
                timeout_graceful_shutdown=_CLOSING_SECONDS,
                timeout_keep_alive=60,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not serving.done():
                # uvicorn has no callback for the end of its startup.
                await asyncio.wait([serving], timeout=0.005)
            if serving.done():
                raise SmokeboxError(
                    f"{app.project.folder / 'app.py'} failed to start.",
                    hint="See the lines above.",
                )
            yield url_of(listener)
        finally:
            server.should_exit = True
            await requests.close()
            await asyncio.wait([serving])
            await app.stop(0)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
