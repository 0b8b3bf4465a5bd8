"""A server that runs: its sockets, its engine, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from smokebox.engine import Host
from smokebox.errors import Conflict
from smokebox.server.app import create_app
from smokebox.server.hosts import Hosts
from smokebox.server.idempotency import Requests
from smokebox.server.keys import Keys
from smokebox.server.state import State
from smokebox.wire.place import socket_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.server.settings import Settings

_BACKLOG = 2048


async def serve(settings: Settings) -> None:
    """Serve until a signal says to stop."""
    async with open_state(settings) as state:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(one) for one in listen(settings)]
            await uvicorn.Server(_config(state)).serve(sockets=sockets)


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Running]:
    """A server on this event loop, for as long as the block lasts."""
    async with open_state(settings) as state:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(one) for one in listen(settings)]
            server = _Embedded(_config(state))
            serving = asyncio.create_task(server.serve(sockets=sockets))
            try:
                yield Running(state=state, socket=socket_path(settings.home), url=_url(sockets))
            finally:
                server.should_exit = True
                await serving


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
        http="httptools",
        ws="websockets-sansio",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=round(state.settings.drain_seconds),
        timeout_keep_alive=60,
    )


def _url(sockets: list[socket.socket]) -> str | None:
    for one in sockets:
        if one.family != socket.AF_UNIX:
            host, port = one.getsockname()[:2]
            return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return None


@contextlib.asynccontextmanager
async def open_state(settings: Settings) -> AsyncIterator[State]:
    """An engine, and what a server keeps besides."""
    async with (
        await Host.open(settings.home, tier=settings.tier, pool=settings.pool) as host,
        await Requests.open(host.home) as requests,
    ):
        yield State(
            host=host,
            settings=settings,
            hosts=Hosts(settings),
            keys=Keys(settings),
            requests=requests,
        )


def listen(settings: Settings) -> list[socket.socket]:
    """The sockets of a server: that of its state directory, and one for others if asked."""
    sockets = [_unix(socket_path(settings.home))]
    if settings.host is not None:
        sockets.append(_tcp(settings.host, settings.port))
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
    listener.listen(_BACKLOG)
    return listener


def _tcp(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise Conflict(
            f"{host}:{port} cannot be listened on: {error.strerror}.",
            hint="Use another with --port, or stop what has it.",
            kind="port",
            name=str(port),
        ) from error
