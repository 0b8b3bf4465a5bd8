"""HTTP server of an app: its socket, its signals and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from typing import TYPE_CHECKING

import uvicorn

from smokebox.app.asgi import asgi
from smokebox.app.guard import OriginGuard, RequestDrain
from smokebox.app.settings import KEYS
from smokebox.errors import InvalidOption, SmokeboxError
from smokebox.foundation.embedded_server import EmbeddedServer
from smokebox.foundation.endpoint import listen, url_of
from smokebox.foundation.signals import handle_signals
from smokebox.foundation.tasks import run_until_first

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
    open: bool = False,
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
        open: Accept requests from other machines without a key.
        grace: Seconds to wait for running work, by default those of the settings.
        ready: Called with the URL once the app is served; may run until it stops.

    Raises:
        InvalidOption: Other machines could send requests without a key.
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
        async with run_app(app, host=host, port=port, open=open) as url:
            await run_until_first(run_ready(url), drain())


@contextlib.asynccontextmanager
async def run_app(
    app: App, *, host: str = LOOPBACK, port: int = 0, open: bool = False
) -> AsyncIterator[str]:
    """Run the app on this event loop for the duration of the block, and yield its URL; see
    `serve`.
    """
    check_exposure(app, host, open=open)
    with contextlib.closing(listen(host, port)) as listener:
        # Started first, so that a file that cannot be opened raises our error.
        await app.start()
        requests = RequestDrain(OriginGuard(asgi(app), host, guarded=not app.keys and not open))
        server = EmbeddedServer(
            uvicorn.Config(
                requests,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
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


def check_exposure(app: App, host: str, *, open: bool) -> None:
    """Raise `InvalidOption` if other machines could send requests without a key."""
    if app.keys or open or is_loopback(host):
        return
    raise InvalidOption(
        f"{host} is reachable from other machines, and this app has no keys.",
        hint=f"Set {KEYS} to one or more keys; behind a proxy that authenticates, "
        "use `smokebox app --open`.",
        option="host",
        value=host,
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
