"""An app that listens: its socket, its signals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
from typing import TYPE_CHECKING, Any

import uvicorn

from smokebox.app.asgi import asgi
from smokebox.app.closing import Closing
from smokebox.app.gate import Gate
from smokebox.app.settings import KEYS
from smokebox.errors import InvalidOption, SmokeboxError
from smokebox.wire.listening import listen, url_of

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
    """Serve until SIGTERM or SIGINT, then give what goes on `grace` seconds to end, by default
    those of the settings.

    What does not end goes on at the next start, and so does what is accepted meanwhile. A
    second signal waits for nothing. `ready` is given the URL once it serves, and may go on
    for as long as it does.
    """
    stopping, hurry = asyncio.Event(), asyncio.Event()
    with _signals(stopping, hurry):
        async with running(app, host=host, port=port, open=open) as url:
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
async def running(
    app: App, *, host: str = LOOPBACK, port: int = 0, open: bool = False
) -> AsyncIterator[str]:
    """The app on this event loop, for as long as the block lasts; gives its URL.

    Raises `InvalidOption` where other machines could ask without a key, unless it is `open`
    to them.
    """
    check_exposure(app, host, open=open)
    with contextlib.closing(listen(host, port)) as listener:
        # First of all, so that what cannot be opened is an error of ours.
        await app.start()
        requests = Closing(Gate(asgi(app), host, guarded=not app.keys and not open))
        server = _Embedded(
            uvicorn.Config(
                requests,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                # What is there to wait for we have waited for.
                timeout_graceful_shutdown=_CLOSING_SECONDS,
                timeout_keep_alive=60,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not serving.done():
                # uvicorn tells nobody when it has started.
                await asyncio.wait([serving], timeout=0.005)
            if serving.done():
                raise SmokeboxError(
                    f"{app.project.folder / 'app.py'} could not be started.",
                    hint="The lines above say why.",
                )
            yield url_of(listener)
        finally:
            server.should_exit = True
            await requests.close()
            await asyncio.wait([serving])
            await app.stop(0)


def check_exposure(app: App, host: str, *, open: bool) -> None:
    """Raise `InvalidOption` where anybody could ask."""
    if app.keys or open or is_loopback(host):
        return
    raise InvalidOption(
        f"on {host} other machines could ask this app, and it has no keys.",
        hint=f"Set {KEYS} to one or more keys; where something else keeps the door, "
        "`smokebox app --open` does without.",
        option="host",
        value=host,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Embedded(uvicorn.Server):
    """A server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _stay(work: Awaitable[None]) -> None:
    await work
    await asyncio.Event().wait()


async def _until(work: Any, hurry: asyncio.Event) -> None:
    """Do that, or leave it where somebody is in a hurry."""
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
