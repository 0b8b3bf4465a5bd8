"""What all parts of a sandbox's handle share: requests about one sandbox that is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from smokebox.client.transport import REQUEST_SECONDS
from smokebox.errors import InvalidOption, NotFound
from smokebox.sandbox.paths import resolve
from smokebox.types import SandboxInfo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping

    import msgspec

    from smokebox.client.socket import Socket
    from smokebox.client.transport import Transport
    from smokebox.wire.requests import Settings
    from smokebox.wire.sse import Event

T = TypeVar("T")

DEFAULT_CWD = "/workspace"


class Handle:
    """One sandbox by its id, made by PUT before the first request about it.

    May be used by several threads and event loops.
    """

    def __init__(self, id: str, transport: Transport, settings: Settings) -> None:
        self.id = id
        self._transport = transport
        self._settings = settings
        self._root = f"/sandboxes/{part('id', id)}"
        self._cwd = settings.cwd or DEFAULT_CWD
        self._found = False
        self._finding: dict[asyncio.AbstractEventLoop, asyncio.Task[SandboxInfo]] = {}

    @property
    def cwd(self) -> str:
        """The absolute directory where relative paths and commands start.

        One that its image or its former settings name is known once a call was made.
        """
        return self._cwd

    def resolve_path(self, path: str) -> str:
        """The absolute form of `path`, without looking at any file."""
        return resolve(path, self.cwd)

    async def _ask(
        self,
        answer: type[T],
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
        timeout: float | None = REQUEST_SECONDS,
        repeat_key: str | None = None,
    ) -> T:
        """Ask about the sandbox; one that somebody destroyed meanwhile is made again."""
        if not self._ready:
            await self._find()
        try:
            return await self._transport.ask(
                answer,
                method,
                self._root + path,
                body=body,
                query=query,
                timeout=timeout,
                repeat_key=repeat_key,
            )
        except NotFound as error:
            if not _is_ours(error):
                raise
        await self._find()
        return await self._transport.ask(
            answer,
            method,
            self._root + path,
            body=body,
            query=query,
            timeout=timeout,
            repeat_key=repeat_key,
        )

    async def _upload(
        self,
        answer: type[T],
        method: str,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        query: Mapping[str, Any] | None = None,
        repeatable: bool = True,
    ) -> T:
        await self._be_there()
        try:
            return await self._transport.upload(
                answer, method, self._root + path, data, query=query, repeatable=repeatable
            )
        except NotFound as error:
            # A stream may have been read by now.
            if not _is_ours(error) or not isinstance(data, bytes):
                raise
        await self._find()
        return await self._transport.upload(answer, method, self._root + path, data, query=query)

    def _events(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Event, None]:
        return self._stream(
            lambda: self._transport.events(method, self._root + path, body=body, query=query)
        )

    def _bytes(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        return self._stream(
            lambda: self._transport.bytes_of(self._root + path, query=query, headers=headers)
        )

    async def _stream(
        self, begin: Callable[[], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        await self._be_there()
        fresh = True
        while True:
            try:
                async with contextlib.aclosing(begin()) as items:
                    async for item in items:
                        fresh = False
                        yield item
                return
            except NotFound as error:
                if not fresh or not _is_ours(error):
                    raise
            fresh = False
            await self._find()

    @contextlib.asynccontextmanager
    async def _socket(self, path: str, *, heartbeat: float) -> AsyncIterator[Socket]:
        await self._be_there()
        async with self._transport.connect(self._root + path, heartbeat=heartbeat) as socket:
            yield socket

    async def _be_there(self) -> None:
        if not self._ready:
            await self._find()

    async def _find(self) -> SandboxInfo:
        """Have the sandbox be there, as it was asked for; many calls at once ask once."""
        loop = asyncio.get_running_loop()
        task = self._finding.get(loop)
        if task is None:
            task = self._finding[loop] = loop.create_task(self._put(self._settings))
            task.add_done_callback(self._end_finding)
        return await asyncio.shield(task)

    def _end_finding(self, task: asyncio.Task[SandboxInfo]) -> None:
        self._finding.pop(task.get_loop(), None)
        # When nobody waits any more, nobody wants to hear of an error.
        if not task.cancelled():
            task.exception()

    async def _put(self, settings: Settings) -> SandboxInfo:
        info = await self._transport.ask(
            SandboxInfo, "PUT", self._root, body=settings, timeout=None
        )
        self._cwd, self._found = info.cwd, True
        await self._attach()
        return info

    @property
    def _ready(self) -> bool:
        """Whether calls about the sandbox can be made: it is there, with all that it needs."""
        return self._found

    async def _attach(self) -> None:
        """Have what the sandbox needs of this process, once it is there."""


def part(option: str, name: object) -> str:
    """A name as a part of a path. What it may be the server knows; a path it cannot be."""
    if isinstance(name, str) and name and "/" not in name:
        return quote(name, safe="")
    raise InvalidOption(
        f"{option} is a name without slashes, not {name!r}.",
        hint="Use letters, digits and hyphens.",
        option=option,
        value=name,
    )


def repeat_key() -> str:
    """What makes a request that makes something safe to repeat."""
    # As `secrets` does it, whose import takes as long as asking a server.
    return os.urandom(16).hex()


def _is_ours(error: NotFound) -> bool:
    return error.fields.get("kind") == "sandbox"
