"""WebSocket over which a server calls the egress handlers of this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from smokebox import wire
from smokebox.client.bindings import env
from smokebox.client.http_client import ConnectFailed, WebSocketRefused
from smokebox.client.transport import REQUEST_SECONDS, deadline
from smokebox.errors import NotFound, ServiceUnavailable, SmokeboxError
from smokebox.wire.handlers import ServeFrame, ServingFrame, from_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.client.http_client import ApiWebSocket
    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler
    from smokebox.wire.frames import Frame

_FIRST_PAUSE = 0.1
_MAX_PAUSE = 5.0
_NOT_FOUND = 404

_log = logging.getLogger("smokebox.client")


class HandlerChannel:
    """Serves the egress handlers of one sandbox's handle to its server.

    The first call that needs the sandbox opens it, on the event loop of that call. It
    reconnects until it is closed or its loop ends. `handlers` are by slot.
    """

    def __init__(
        self, sandbox_id: str, transport: Transport, path: str, handlers: Mapping[str, Handler]
    ) -> None:
        self.handlers = dict(handlers)
        self._sandbox_id = sandbox_id
        self._transport = transport
        self._path = path
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: _HandlerSocket | None = None
        self._error: SmokeboxError | None = None
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()

    @property
    def connected(self) -> bool:
        """True if the server can call the handlers."""
        return self._socket is not None and self._socket.registered

    async def open(self) -> None:
        """Connect if needed, and return when the server knows all handlers."""
        here = asyncio.get_running_loop()
        with self._lock:
            if self._loop is None or not self._loop.is_running() or _is_done(self._task):
                self._loop, self._error = here, None
                self._changed, self._wanted = asyncio.Event(), asyncio.Event()
                self._task = here.create_task(self._run(self._changed))
                self._transport.handler_channels.add(self)
            loop = self._loop
        async with deadline(REQUEST_SECONDS, "connecting the egress handlers"):
            if loop is here:
                await self._register()
            else:
                future = asyncio.run_coroutine_threadsafe(self._register(), loop)
                await asyncio.wrap_future(future)

    def close(self) -> None:
        """Disconnect. Safe to repeat, and to call from any thread."""
        with self._lock:
            task, loop, self._task, self._socket = self._task, self._loop, None, None
        if task is not None and loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

    async def aclose(self) -> None:
        """Disconnect, and wait for running handlers if they run on this loop."""
        task, here = self._task, self._loop is asyncio.get_running_loop()
        self.close()
        if task is not None and here and task is not asyncio.current_task():
            await asyncio.wait([task])

    async def _register(self) -> None:
        while self._socket is None:
            if _is_done(self._task):
                raise self._error or ServiceUnavailable(
                    f"the egress handlers of sandbox {self._sandbox_id} were disconnected.",
                    hint="Repeat the call, which connects them again.",
                    service="server",
                )
            self._wanted.set()
            self._changed.clear()
            await self._changed.wait()
        await self._socket.register(list(self.handlers))

    async def _run(self, changed: asyncio.Event) -> None:
        """Stay connected. Sets `changed` when connected, and when it gives up."""
        pause = _FIRST_PAUSE
        try:
            while True:
                try:
                    await self._connect(changed)
                    pause = _FIRST_PAUSE
                except WebSocketRefused as error:
                    self._error = self._refusal(error)
                    return
                except (SmokeboxError, ConnectFailed, ConnectionError) as error:
                    _log.debug("no handler channel to sandbox %s: %s", self._sandbox_id, error)
                self._socket = None
                # A call that needs the handlers cuts a long pause short.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wanted.wait()
                    await asyncio.sleep(_FIRST_PAUSE)
                self._wanted.clear()
                pause = min(pause * 2, _MAX_PAUSE)
        finally:
            self._socket = None
            # The task is done only after this.
            asyncio.get_running_loop().call_soon(changed.set)

    async def _connect(self, changed: asyncio.Event) -> None:
        heartbeat = wire.SILENCE / 2
        async with self._transport.websocket(
            self._path, heartbeat=heartbeat, retry=False
        ) as websocket:
            self._socket = _HandlerSocket(websocket, self._sandbox_id, self.handlers)
            changed.set()
            await self._socket.run()

    def _refusal(self, error: WebSocketRefused) -> SmokeboxError:
        if error.status == _NOT_FOUND:
            return NotFound(
                f"there is no sandbox {self._sandbox_id!r}.",
                hint="It was destroyed; the next call creates another.",
                kind="sandbox",
                name=self._sandbox_id,
            )
        return ServiceUnavailable(
            f"the server refused the egress handlers of sandbox {self._sandbox_id}: {error}.",
            hint="Check that proxies on the way support WebSockets.",
            service="server",
        )


class _HandlerSocket:
    """One WebSocket of a channel. `registered` is set once the server knows its handlers."""

    def __init__(
        self, websocket: ApiWebSocket, sandbox_id: str, handlers: Mapping[str, Handler]
    ) -> None:
        # Few sandboxes have handlers.
        from smokebox.egress.handler_server import HandlerServer

        self.registered = False
        self._websocket = websocket
        self._handlers = handlers
        self._server = HandlerServer(sandbox_id, handlers, env, self._send)
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[None]] = {}

    async def run(self) -> None:
        """Serve until the connection ends."""
        try:
            # Also after a reconnect, which no call waits for.
            await self._send_slots(list(self._handlers))
            async for message in self._websocket:
                self._receive(message)
        finally:
            self.registered = False
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(_channel_lost())
                    future.exception()
            await self._server.aclose()

    async def register(self, slots: list[str]) -> None:
        """Return when the server knows which slots are served here."""
        await (await self._send_slots(slots))

    async def _send_slots(self, slots: list[str]) -> asyncio.Future[None]:
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(ServeFrame(number=number, slots=slots))
        except ConnectionError as error:
            raise _channel_lost() from error
        return future

    def _receive(self, data: str | bytes) -> None:
        try:
            frame = from_server(data)
        except ValueError as error:
            # For example an error frame of a server that stops.
            _log.debug("ignored a frame of the handler channel: %s", error)
            return
        if isinstance(frame, ServingFrame):
            future = self._pending.pop(frame.number, None)
            self.registered = True
            if future is not None and not future.done():
                future.set_result(None)
        else:
            self._server.receive(frame)

    async def _send(self, frame: Frame | bytes) -> None:
        message = frame if isinstance(frame, bytes) else msgspec.json.encode(frame).decode()
        await self._websocket.send(message)


def _is_done(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()


def _channel_lost() -> ServiceUnavailable:
    return ServiceUnavailable(
        "the connection of the egress handlers was lost.",
        hint="Repeat the call, which connects them again.",
        service="server",
    )
