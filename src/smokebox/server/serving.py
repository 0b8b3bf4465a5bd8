"""A server that runs: its sockets, its engine, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import uvicorn

from smokebox.engine import Host
from smokebox.server import keepalive
from smokebox.server.app import create_app
from smokebox.server.drain import Drain
from smokebox.server.health import Health
from smokebox.server.hosts import Hosts
from smokebox.server.idempotency import Requests
from smokebox.server.keys import Keys
from smokebox.server.limits import Limits
from smokebox.server.metrics import Metrics
from smokebox.server.previews.front import Front
from smokebox.server.previews.previews import Previews
from smokebox.server.state import State
from smokebox.server.telemetry import Telemetry
from smokebox.wire import listening
from smokebox.wire.frames import LARGEST_FRAME
from smokebox.wire.place import socket_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from smokebox.server.settings import Settings

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_CLOSING_SECONDS = 2
_IDLE_CHECK_SECONDS = 5.0


async def serve(
    settings: Settings, ready: Callable[[Running], Awaitable[None]] | None = None
) -> None:
    """Serve until a signal, a request to POST /api/shutdown, or idleness ends it.

    `ready` is awaited once it serves. After SIGTERM or SIGINT new requests are refused, those
    that run have `drain_seconds`, and the sandboxes run on: the next server of the state
    directory takes them over, so that restarting or upgrading one ends nobody's processes. A
    second signal waits for no request. `POST /api/shutdown` can put them to sleep instead.
    """
    drain = Drain()
    # To the very end: a signal while sandboxes are put to sleep must not break that off.
    with _signals(drain):
        async with running(settings, drain) as server:
            if ready is not None:
                await ready(server)
            await drain.asked.wait()


@contextlib.asynccontextmanager
async def running(settings: Settings, drain: Drain | None = None) -> AsyncIterator[Running]:
    """A server on this event loop, for as long as the block lasts.

    At its end sandboxes go to sleep, unless whoever asked for the end had them kept.
    """
    async with open_state(settings, drain) as state:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(one) for one in listen(settings)]
            state.previews.start(_port(sockets))
            await state.previews.resume()
            server = _Embedded(_config(state))
            serving = asyncio.create_task(server.serve(sockets=sockets))
            watching = asyncio.create_task(_ask_when_idle(state))
            try:
                yield Running(state=state, socket=socket_path(settings.home), url=_url(sockets))
            finally:
                watching.cancel()
                state.drain.ask(keep=False)
                until = time.monotonic() + settings.drain_seconds
                await state.previews.finish(settings.drain_seconds)
                await state.drain.finish(max(0.0, until - time.monotonic()))
                server.should_exit = True
                await asyncio.wait((serving, watching))
            serving.result()
        await state.host.aclose(detach=state.drain.keep)


@contextlib.contextmanager
def _signals(drain: Drain) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if drain.begun:
            drain.hurry()
        drain.ask(keep=True)

    for number in _STOPPING:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in _STOPPING:
            loop.remove_signal_handler(number)


async def _ask_when_idle(state: State) -> None:
    """Have the server end once nobody has asked it for a while, and no sandbox runs."""
    patience, drain = state.settings.idle_exit, state.drain
    while patience is not None:
        rest = drain.last_request + patience - time.monotonic()
        await asyncio.sleep(max(rest, min(patience / 4, _IDLE_CHECK_SECONDS)))
        if drain.requests or time.monotonic() - drain.last_request < patience:
            continue
        if not await state.host.list(status="active"):
            drain.ask(keep=False)
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that runs: its unix socket, and its address if it listens on one."""

    state: State
    socket: str
    url: str | None


class _Embedded(uvicorn.Server):
    """A server that leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(state: State) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=cast("type[asyncio.Protocol]", functools.partial(Front, state.previews)),
        ws=keepalive.WebSocketProtocol,
        ws_max_size=LARGEST_FRAME,
        ws_ping_interval=keepalive.PING_SECONDS,
        ws_ping_timeout=keepalive.PONG_SECONDS,
        ws_per_message_deflate=False,
        server_header=False,
        date_header=False,
        # What is there to wait for we have waited for.
        timeout_graceful_shutdown=_CLOSING_SECONDS,
        timeout_keep_alive=60,
    )


def _url(sockets: list[socket.socket]) -> str | None:
    for one in sockets:
        if one.family != socket.AF_UNIX:
            return listening.url_of(one)
    return None


def _port(sockets: list[socket.socket]) -> int | None:
    for one in sockets:
        if one.family != socket.AF_UNIX:
            return int(one.getsockname()[1])
    return None


@contextlib.asynccontextmanager
async def open_state(settings: Settings, drain: Drain | None = None) -> AsyncIterator[State]:
    """An engine, and what a server keeps besides."""
    telemetry = Telemetry.open(settings)
    drain = drain or Drain()
    async with contextlib.AsyncExitStack() as stack:
        if telemetry is not None:
            stack.push_async_callback(telemetry.aclose)
        host = await Host.open(
            settings.home, tier=settings.tier, pool=settings.pool, backups=settings.backups
        )
        await stack.enter_async_context(host)
        keys = Keys(settings)
        stack.push_async_callback(keys.aclose)
        requests = await stack.enter_async_context(await Requests.open(host.home))
        metrics = Metrics(drain)
        yield State(
            host=host,
            settings=settings,
            hosts=Hosts(settings),
            keys=keys,
            requests=requests,
            limits=Limits(settings),
            drain=drain,
            health=Health(),
            metrics=metrics,
            telemetry=telemetry,
            previews=Previews(
                host=host, settings=settings, keys=keys, drain=drain, metrics=metrics
            ),
        )


def listen(settings: Settings) -> list[socket.socket]:
    """The sockets of a server: that of its state directory, and one for others if asked."""
    sockets = [_unix(socket_path(settings.home))]
    if settings.host is not None:
        sockets.append(listening.listen(settings.host, settings.port))
    return sockets


def _unix(path: str) -> socket.socket:
    # The state directory is ours by now: what is there is of a server that is no more.
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
        try:
            # A path of any length, by a short name: sockets take 107 bytes.
            listener.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        finally:
            os.close(directory)
    finally:
        os.umask(before)
    listener.listen(listening.BACKLOG)
    return listener
