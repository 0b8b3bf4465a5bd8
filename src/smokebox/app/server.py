"""HTTP server of an app: its socket, its signals and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from typing import TYPE_CHECKING, Any

import uvicorn

from smokebox.app.asgi import asgi
from smokebox.app.guard import OriginGuard, RequestDrain
from smokebox.app.settings import KEYS
from smokebox.errors import InvalidOption, SmokeboxError
from smokebox.foundation.endpoint import listen, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from smokebox.app.app import App

PORT = 8600
LOOPBACK = "127.0.0.1"
_CLOSING_SECONDS = 2
_STOPPING = (signal.SIGINT, signal.SIGTERM)


async def serve(
    app: App,
    *,
    host: str = LOOPBACK,
    port: int = PORT,
    open: bool = False,
    grace: float | None = None,
    ready: Callable[[str], Awaitable[None]] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then give running work `grace` seconds, by default those of
    the settings.

    Work that has not ended continues at the next start, and so does work accepted meanwhile. A
    second signal stops at once. `ready` is called with the URL once the app is served, and may run
    until it stops.
    """
    stopping, hurry = asyncio.Event(), asyncio.Event()
    with _signals(stopping, hurry):
        async with run_app(app, host=host, port=port, open=open) as url:
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stopping.wait())]
            if ready is not None:
                tasks.append(asyncio.create_task(_stay(ready(url))))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await _until(app.drain(grace), hurry)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()


@contextlib.asynccontextmanager
async def run_app(
    app: App, *, host: str = LOOPBACK, port: int = 0, open: bool = False
) -> AsyncIterator[str]:
    """Run the app on this event loop for the duration of the block, and yield its URL.

    Raises `InvalidOption` if other machines could reach it without a key, unless it is `open`.
    """
    check_exposure(app, host, open=open)
    with contextlib.closing(listen(host, port)) as listener:
        # Started first, so that a file that cannot be opened raises our error.
        await app.start()
        requests = RequestDrain(OriginGuard(asgi(app), host, guarded=not app.keys and not open))
        server = _Embedded(
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


class _Embedded(uvicorn.Server):
    """uvicorn server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _stay(work: Awaitable[None]) -> None:
    await work
    await asyncio.Event().wait()


async def _until(work: Any, hurry: asyncio.Event) -> None:
    """Run a coroutine, or stop waiting for it once `hurry` is set."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextlib.contextmanager
def _signals(stopping: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            hurry.set()
        stopping.set()

    for number in _STOPPING:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in _STOPPING:
            loop.remove_signal_handler(number)
