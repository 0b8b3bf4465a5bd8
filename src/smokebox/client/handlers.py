"""The channel by which a server asks the handlers of this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from smokebox import wire
from smokebox.client.answering import Broken, Refused, Unconnected, deadline
from smokebox.client.bindings import env
from smokebox.client.transport import REQUEST_SECONDS
from smokebox.errors import NotFound, ServiceUnavailable, SmokeboxError
from smokebox.wire.handlers import ServeFrame, ServingFrame, from_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.client.socket import Socket
    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler
    from smokebox.wire.frames import Frame

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_NOT_FOUND = 404

_log = logging.getLogger("smokebox.client")


class HandlerChannel:
    """Has the handlers of one sandbox's handle at the service of its server.

    It is opened by the first call that needs the sandbox, on the event loop of that call,
    and connected again when it breaks, until it is closed or its loop ends. `handlers` are
    by slot.
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
        self._link: _Link | None = None
        self._fault: SmokeboxError | None = None
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the server has somebody to ask, or nothing to ask for."""
        return not self.handlers or (self._link is not None and self._link.served)

    async def open(self) -> None:
        """Return once the server asks us for all handlers that there are."""
        here = asyncio.get_running_loop()
        with self._lock:
            if self._loop is None or not self._loop.is_running() or _over(self._task):
                self._loop, self._fault = here, None
                self._changed, self._wanted = asyncio.Event(), asyncio.Event()
                self._task = here.create_task(self._run(self._changed))
                self._transport.channels.add(self)
            loop = self._loop
        async with deadline(REQUEST_SECONDS, "the channel of handlers"):
            if loop is here:
                await self._announce()
            else:
                told = asyncio.run_coroutine_threadsafe(self._announce(), loop)
                await asyncio.wrap_future(told)

    def close(self) -> None:
        """Serve no more; safe to repeat, and from any thread."""
        with self._lock:
            task, loop, self._task, self._link = self._task, self._loop, None, None
        if task is not None and loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)

    async def aclose(self) -> None:
        """As `close`, and wait for the end of what is served on this loop."""
        task, here = self._task, self._loop is asyncio.get_running_loop()
        self.close()
        if task is not None and here and task is not asyncio.current_task():
            await asyncio.wait([task])

    async def _announce(self) -> None:
        while self._link is None:
            if _over(self._task):
                raise self._fault or _unserved(self._sandbox_id)
            self._wanted.set()
            self._changed.clear()
            await self._changed.wait()
        await self._link.announce(list(self.handlers))

    async def _run(self, changed: asyncio.Event) -> None:
        """Be connected. `changed` says that there is, or will never be, a link."""
        pause = _FIRST_PAUSE
        try:
            while True:
                try:
                    await self._connect(changed)
                    pause = _FIRST_PAUSE
                except _Refused as refused:
                    self._fault = refused.fault
                    return
                except (SmokeboxError, Unconnected, ConnectionError) as error:
                    _log.debug("no channel to sandbox %s: %s", self._sandbox_id, error)
                self._link = None
                # Whoever needs it now does not wait for the rest of a long pause.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wanted.wait()
                    await asyncio.sleep(_FIRST_PAUSE)
                self._wanted.clear()
                pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            self._link = None
            # The task itself is over only after this.
            asyncio.get_running_loop().call_soon(changed.set)

    async def _connect(self, changed: asyncio.Event) -> None:
        try:
            connecting = self._transport.connect(
                self._path, heartbeat=wire.SILENCE / 2, again=False
            )
            async with connecting as socket:
                link = self._link = _Link(socket, self._sandbox_id, self.handlers)
                changed.set()
                await link.run()
        except Refused as error:
            raise _Refused(self._sandbox_id, error) from error


class _Link:
    """One connection of a channel, while it lasts; `served` once the server knows of us."""

    def __init__(self, socket: Socket, sandbox_id: str, handlers: Mapping[str, Handler]) -> None:
        # Few sandboxes have handlers.
        from smokebox.egress.handler_server import HandlerServer

        self.served = False
        self._socket = socket
        self._handlers = handlers
        self._serving = HandlerServer(sandbox_id, handlers, env, self._send)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def run(self) -> None:
        """Serve until the connection ends."""
        try:
            # By itself: after a break nobody else would.
            await self._say(list(self._handlers))
            async for message in self._socket:
                self._hear(message)
        finally:
            self.served = False
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(_broken())
                    waiter.exception()
            await self._serving.aclose()

    async def announce(self, slots: list[str]) -> None:
        """Return once the server knows which slots are served here."""
        await (await self._say(slots))

    async def _say(self, slots: list[str]) -> asyncio.Future[None]:
        number = next(self._numbers)
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(ServeFrame(number=number, slots=slots))
        except ConnectionError as error:
            raise _broken() from error
        return waiter

    def _hear(self, data: str | bytes) -> None:
        try:
            frame = from_server(data)
        except ValueError as error:
            # Such as the last words of a server that ends.
            _log.debug("a frame that is not for handlers: %s", error)
            return
        if isinstance(frame, ServingFrame):
            waiter = self._waiting.pop(frame.number, None)
            self.served = True
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        else:
            self._serving.hear(frame)

    async def _send(self, frame: Frame | bytes) -> None:
        message = frame if isinstance(frame, bytes) else msgspec.json.encode(frame).decode()
        try:
            await self._socket.send(message)
        except Broken as error:
            raise ConnectionResetError(str(error)) from error


class _Refused(Exception):
    """The server does not take the channel: there is no use in asking again."""

    def __init__(self, sandbox_id: str, error: Refused) -> None:
        self.fault: SmokeboxError = ServiceUnavailable(
            f"the handlers of sandbox {sandbox_id} cannot be connected to their server: {error}.",
            hint="Is there a proxy on the way that does not know WebSockets?",
            service="server",
        )
        if error.status == _NOT_FOUND:
            self.fault = NotFound(
                f"there is no sandbox {sandbox_id!r}.",
                hint="It was destroyed; the next call makes another.",
                kind="sandbox",
                name=sandbox_id,
            )


def _over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()


def _broken() -> ServiceUnavailable:
    return ServiceUnavailable(
        "the channel of handlers broke.",
        hint="Call again: it is connected anew.",
        service="server",
    )


def _unserved(sandbox_id: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"the handlers of sandbox {sandbox_id} are not connected to their server any more.",
        hint="Call again: the next call connects them.",
        service="server",
    )
