"""A running server: its sockets, its engine and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import stat
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import uvicorn

from smokebox.engine import Host
from smokebox.foundation import endpoint
from smokebox.foundation.embedded_server import EmbeddedServer
from smokebox.foundation.endpoint import socket_path
from smokebox.foundation.loop_shares import create_task
from smokebox.foundation.memory import return_large_blocks
from smokebox.foundation.scheduling import prefer_latency
from smokebox.foundation.signals import handle_signals
from smokebox.foundation.tenant_threads import TenantExecutor
from smokebox.server import websocket
from smokebox.server.app import create_app
from smokebox.server.health import Drain, HealthCheck
from smokebox.server.hosts import AllowedHosts
from smokebox.server.idempotency import IdempotencyStore
from smokebox.server.log_search import LogSearch
from smokebox.server.metrics import Metrics
from smokebox.server.previews.previews import Previews
from smokebox.server.previews.protocol import ApiOrPreviewProtocol
from smokebox.server.state import ServerState
from smokebox.server.telemetry import Telemetry
from smokebox.server.tenancy.handlers import load_allowed_handler
from smokebox.server.tenancy.quotas import Quotas
from smokebox.server.tenancy.registry_access import access_of_request
from smokebox.tenancy.connections import ConnectionLimits
from smokebox.tenancy.keys import Keys
from smokebox.tenancy.rate_limit import RateLimiter
from smokebox.tenancy.running_requests import RunningRequests
from smokebox.wire.frames import LARGEST_FRAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from smokebox.server.settings import ServerSettings

_CLOSING_SECONDS = 2
# Threads that walk trees and unpack archives keep the interpreter from the event loop for so long;
# by default for 5 ms each time.
_SWITCH_SECONDS = 0.0005
# The event loop sleeps often: beside programs that compute, it would wait for 3 ms each time.
_SLICE_SECONDS = 0.0001
_IDLE_CHECK_SECONDS = 5.0


async def serve(
    settings: ServerSettings, ready: Callable[[RunningServer], Awaitable[None]] | None = None
) -> None:
    """Serve until a signal, `POST /api/shutdown` or the idle timer stops the server.

    `ready` is awaited once it serves. After SIGTERM or SIGINT new requests are refused, running
    ones have `drain_seconds`, and sandboxes keep running: the next server of the state directory
    adopts them, so a restart or an upgrade ends no processes. A second signal does not wait for
    requests. `POST /api/shutdown` can put the sandboxes to sleep instead.
    """
    drain = Drain()

    def stop(_: signal.Signals) -> None:
        if drain.begun:
            drain.stop_waiting()
        drain.begin(keep=True)

    sys.setswitchinterval(_SWITCH_SECONDS)
    return_large_blocks()
    loop = asyncio.get_running_loop()
    loop.set_task_factory(create_task)
    loop.set_default_executor(TenantExecutor())
    prefer_latency(_SLICE_SECONDS)
    # Around everything: a signal must not interrupt putting sandboxes to sleep.
    with handle_signals((signal.SIGINT, signal.SIGTERM), stop):
        async with run_server(settings, drain) as server:
            if ready is not None:
                await ready(server)
            await drain.started.wait()


@contextlib.asynccontextmanager
async def run_server(
    settings: ServerSettings, drain: Drain | None = None
) -> AsyncIterator[RunningServer]:
    """Run a server on this event loop for the duration of the block.

    At the end sandboxes are put to sleep, unless the drain began with `keep`.
    """
    async with open_state(settings, drain) as state:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket) for socket in listen(settings)]
            state.previews.start(_port(sockets))
            await state.previews.resume()
            server = EmbeddedServer(_config(state))
            serving = asyncio.create_task(server.serve(sockets=sockets))
            idle_watch = asyncio.create_task(_stop_when_idle(state))
            try:
                yield RunningServer(
                    state=state, socket=socket_path(settings.home), url=_url(sockets)
                )
            finally:
                idle_watch.cancel()
                state.drain.begin(keep=False)
                until = time.monotonic() + settings.drain_seconds
                await state.previews.finish(settings.drain_seconds)
                await state.drain.finish(max(0.0, until - time.monotonic()))
                server.should_exit = True
                await asyncio.wait((serving, idle_watch))
            serving.result()
        await state.host.aclose(detach=state.drain.keep)


async def _stop_when_idle(state: ServerState) -> None:
    """Stop the server after `idle_exit` seconds without a request and a running sandbox."""
    idle_exit, drain = state.settings.idle_exit, state.drain
    while idle_exit is not None:
        rest = drain.last_request + idle_exit - time.monotonic()
        await asyncio.sleep(max(rest, min(idle_exit / 4, _IDLE_CHECK_SECONDS)))
        if drain.requests or time.monotonic() - drain.last_request < idle_exit:
            continue
        if not await state.host.list(status="active"):
            drain.begin(keep=False)
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A running server: its unix socket, and its URL if it listens on TCP."""

    state: ServerState
    socket: str
    url: str | None


def _config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=cast(
            "type[asyncio.Protocol]", functools.partial(ApiOrPreviewProtocol, state.previews)
        ),
        ws=cast(
            "type[asyncio.Protocol]",
            functools.partial(websocket.WebSocketProtocol, state.connections),
        ),
        ws_max_size=LARGEST_FRAME,
        ws_ping_interval=websocket.PING_SECONDS,
        ws_ping_timeout=websocket.PONG_SECONDS,
        ws_per_message_deflate=False,
        server_header=False,
        # `ConnectionLimits` knows which proxies to trust; uvicorn would trust this machine.
        proxy_headers=False,
        date_header=False,
        # The drain has already waited for requests.
        timeout_graceful_shutdown=_CLOSING_SECONDS,
        timeout_keep_alive=60,
    )


def _url(sockets: list[socket.socket]) -> str | None:
    for one in sockets:
        if one.family != socket.AF_UNIX:
            return endpoint.url_of(one)
    return None


def _port(sockets: list[socket.socket]) -> int | None:
    for one in sockets:
        if one.family != socket.AF_UNIX:
            return int(one.getsockname()[1])
    return None


@contextlib.asynccontextmanager
async def open_state(
    settings: ServerSettings, drain: Drain | None = None
) -> AsyncIterator[ServerState]:
    """Open the engine and the stores of a server for the duration of the block."""
    telemetry = Telemetry.open(settings)
    drain = drain or Drain()
    async with contextlib.AsyncExitStack() as stack:
        if telemetry is not None:
            stack.push_async_callback(telemetry.aclose)
        quotas = Quotas(settings)
        host = quotas.host = await Host.open(
            settings.home,
            tier=settings.tier,
            pool=settings.pool,
            backups=settings.backups,
            admit=quotas.admit,
            admit_snapshot=quotas.admit_snapshot,
            directories=settings.directories,
            load_handler=functools.partial(load_allowed_handler, allowed=settings.handlers),
            group_cpu=quotas.group_cpu,
            storage_pool=settings.storage_pool,
            registries=settings.registries,
            pull_access=lambda image, scope: access_of_request(image, scope, settings, quotas),
        )
        await stack.enter_async_context(host)
        keys = Keys(
            settings.home,
            settings.profiles,
            required=settings.needs_keys,
            checks_peers=settings.checks_peers,
        )
        stack.push_async_callback(keys.aclose)
        await asyncio.to_thread(keys.refresh)
        idempotency = await IdempotencyStore.open(host.home)
        stack.push_async_callback(idempotency.aclose)
        metrics = Metrics(drain)
        running = RunningRequests()
        await stack.enter_async_context(running.watch(keys))
        connections = ConnectionLimits(
            per_address=settings.address_connections,
            total=settings.max_connections,
            trusted_proxies=settings.trusted_proxies,
        )
        log_search = LogSearch()
        stack.push_async_callback(log_search.aclose)
        yield ServerState(
            host=host,
            settings=settings,
            hosts=AllowedHosts(settings),
            keys=keys,
            idempotency=idempotency,
            rate_limiter=RateLimiter(
                rate=settings.rate,
                concurrency=settings.concurrency,
                socket_too=settings.limit_socket,
            ),
            quotas=quotas,
            drain=drain,
            health=HealthCheck(),
            metrics=metrics,
            telemetry=telemetry,
            previews=Previews(
                host=host,
                settings=settings,
                keys=keys,
                drain=drain,
                metrics=metrics,
                connections=connections,
                running=running,
            ),
            connections=connections,
            running=running,
            log_search=log_search,
        )


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Listen on the unix socket of the state directory, and on TCP if a host is set."""
    sockets = [_unix(socket_path(settings.home))]
    if settings.host is not None:
        sockets.append(endpoint.listen(settings.host, settings.port))
    return sockets


def _unix(path: str) -> socket.socket:
    # We own the state directory, so an existing socket is left over from an earlier server.
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
        try:
            # A short name for a path of any length: socket addresses have at most 107 bytes.
            listener.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        finally:
            os.close(directory)
    finally:
        os.umask(before)
    listener.listen(endpoint.BACKLOG)
    return listener
