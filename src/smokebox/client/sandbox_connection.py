"""Requests about one sandbox, which is created on the server before the first of them."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from smokebox.client.handler_channel import HandlerChannel
from smokebox.client.http_client import is_connection_lost
from smokebox.client.image import is_image_file, is_local, local_context
from smokebox.client.images import Images, with_own_credentials
from smokebox.client.transport import REQUEST_SECONDS
from smokebox.errors import InvalidOption, NotFound, SandboxGone, ServiceUnavailable
from smokebox.foundation.paths import resolve
from smokebox.types import SandboxInfo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping

    from smokebox.client.http_client import ApiWebSocket
    from smokebox.client.settings import ClientSettings
    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler
    from smokebox.foundation.sse import Event
    from smokebox.wire.requests import Settings

T = TypeVar("T")

DEFAULT_CWD = "/workspace"
_RESUME_ATTEMPTS = 8
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 5.0


class SandboxConnection:
    """One sandbox on one server, created before the first request, and again after a destroy.

    `channel` serves the egress handlers that are functions of this process. May be used by
    several threads and event loops.
    """

    def __init__(
        self,
        id: str,
        transport: Transport,
        settings: ClientSettings,
        handlers: Mapping[str, Handler],
    ) -> None:
        self.id = id
        self.transport = transport
        self.settings = settings
        self.root = f"/sandboxes/{path_segment('id', id)}"
        self.cwd = settings.cwd or DEFAULT_CWD
        self.created = False
        self.channel = HandlerChannel(id, transport, f"{self.root}/egress/handlers", handlers)
        weakref.finalize(self, self.channel.close).atexit = False
        self._creating: dict[asyncio.AbstractEventLoop, _Creation] = {}

    def resolve_path(self, path: str) -> str:
        """Return `path` as an absolute path, without looking at any file."""
        return resolve(path, self.cwd)

    async def request(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: msgspec.Struct | None = None,
        data: bytes | AsyncIterable[bytes] | None = None,
        idempotency_key: str | None = None,
        retry: bool = True,
        timeout: float | None = REQUEST_SECONDS,
    ) -> T:
        """Send a request below the sandbox's path; see `Transport.request`."""
        await self.ensure_created()
        recreated = False
        while True:
            try:
                return await self.transport.request(
                    kind,
                    method,
                    self.root + path,
                    query=query,
                    body=body,
                    data=data,
                    idempotency_key=idempotency_key,
                    retry=retry,
                    timeout=timeout,
                )
            except NotFound as error:
                # A stream may have been consumed, and cannot be sent a second time.
                streamed = not isinstance(data, bytes | None)
                if recreated or streamed or not _is_destroyed(error):
                    raise
            await self.create()
            recreated = True

    def events(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Send a request and yield the events of its response."""
        target = self.root + path
        return self._stream(lambda: self.transport.events(method, target, body=body, query=query))

    async def resumed_events(
        self, path: str, query: Mapping[str, Any]
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a stream from the query's `cursor`, reconnecting as needed.

        A lost connection is replaced by one that starts after the last event. Raises the
        last error when several attempts in a row yield nothing.
        """
        query, failures = dict(query), 0
        while True:
            try:
                async with contextlib.aclosing(self.events("GET", path, query=query)) as events:
                    async for event in events:
                        if event.id is not None:
                            query["cursor"] = event.id
                        failures = 0
                        yield event
                return
            except (SandboxGone, ServiceUnavailable) as error:
                failures += 1
                retry = is_connection_lost(error) or isinstance(error, ServiceUnavailable)
                if not retry or failures == _RESUME_ATTEMPTS:
                    raise
            await asyncio.sleep(min(_FIRST_PAUSE * 2**failures, _MAX_PAUSE))

    def download(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Send a GET request and yield the bytes of its response."""
        target = self.root + path
        return self._stream(lambda: self.transport.download(target, query=query, headers=headers))

    @contextlib.asynccontextmanager
    async def websocket(self, path: str, *, heartbeat: float) -> AsyncIterator[ApiWebSocket]:
        """Open a WebSocket that pings the server every `heartbeat` seconds."""
        await self.ensure_created()
        async with self.transport.websocket(self.root + path, heartbeat=heartbeat) as socket:
            yield socket

    async def ensure_created(self) -> None:
        """Create the sandbox and connect its handlers, unless that was done before."""
        if not self.created or (self.channel.handlers and not self.channel.connected):
            await self.create()

    async def create(self) -> SandboxInfo:
        """Create or find the sandbox; concurrent calls on one event loop share one request.

        An image of files here is built or loaded first, as long as one of the calls waits for it.
        """
        loop = asyncio.get_running_loop()
        creation = self._creating.get(loop)
        if creation is None:
            creation = self._creating[loop] = _Creation(self)
            creation.task.add_done_callback(self._forget_creation)
        creation.waiting += 1
        try:
            return await asyncio.shield(creation.task)
        finally:
            creation.waiting -= 1
            if creation.preparing and not creation.waiting and not creation.task.done():
                # A build may take for ever: the next call begins another.
                creation.task.cancel()
                self._forget_creation(creation.task)

    async def put(self, creation: _Creation | None = None) -> SandboxInfo:
        """Send the settings to the server, then connect the handlers.

        An image of files here is built or loaded first.
        """
        settings = await with_server_image(self.transport, self.settings)
        if creation is not None:
            creation.preparing = False

        async def send() -> SandboxInfo:
            return await self.transport.request(
                SandboxInfo, "PUT", self.root, body=settings, timeout=None
            )

        info = await with_own_credentials(self.transport, settings.image, send)
        self.set_created(info)
        if self.channel.handlers:
            await self.channel.open()
        return info

    def set_created(self, info: SandboxInfo) -> None:
        """Record that the sandbox exists, with the directory it starts in."""
        self.cwd, self.created = info.cwd, True

    async def destroy(self) -> None:
        """Destroy the sandbox and disconnect its handlers."""
        await self.transport.request(type(None), "DELETE", self.root, timeout=None)
        self.created = False
        await self.channel.aclose()

    async def _stream(
        self, start: Callable[[], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        await self.ensure_created()
        retry = True
        while True:
            try:
                async with contextlib.aclosing(start()) as items:
                    async for item in items:
                        retry = False
                        yield item
                return
            except NotFound as error:
                if not retry or not _is_destroyed(error):
                    raise
            retry = False
            await self.create()

    def _forget_creation(self, task: asyncio.Task[SandboxInfo]) -> None:
        loop = task.get_loop()
        # Another may have begun after this one was cancelled.
        if (creation := self._creating.get(loop)) is not None and creation.task is task:
            del self._creating[loop]
        # All waiters may have been cancelled: mark the exception as retrieved.
        if task.done() and not task.cancelled():
            task.exception()


class _Creation:
    """A creation under way: whether it prepares the image, and the calls that wait for it."""

    def __init__(self, connection: SandboxConnection) -> None:
        self.preparing = True
        self.waiting = 0
        self.task = asyncio.get_running_loop().create_task(connection.put(self))


async def with_server_image(transport: Transport, settings: ClientSettings) -> Settings:
    """Return settings for the server: an image of files here is built or loaded first."""
    image = await _server_image(transport, settings)
    return msgspec.structs.replace(settings.for_server(), image=image)


async def _server_image(transport: Transport, settings: ClientSettings) -> str | None:
    """Return the name or digest of an image of the server."""
    # Most images are names, and need no parser.
    if is_image_file(settings.image):
        loaded = await Images(transport).load(
            settings.image or "", names=(), progress=transport.image_progress
        )
        return loaded.digest
    if not is_local(settings.image):
        return settings.image
    from smokebox.client.image_builds import ImageBuilds

    context = await asyncio.to_thread(local_context, settings.image or "")
    return await ImageBuilds(transport).build(
        context,
        egress=settings.egress,
        mirrors=bool(settings.mirrors),
        on_event=transport.image_progress,
    )


def path_segment(option: str, name: object) -> str:
    """Return a name quoted as one segment of a path.

    Raises:
        InvalidOption: It is empty, has a slash or is not a str. The server checks the rest.
    """
    if isinstance(name, str) and name and "/" not in name:
        return quote(name, safe="")
    raise InvalidOption(
        f"{option} is a name without slashes, not {name!r}.",
        hint="Use letters, digits and hyphens.",
        option=option,
        value=name,
    )


def _is_destroyed(error: NotFound) -> bool:
    return error.fields.get("kind") == "sandbox"
