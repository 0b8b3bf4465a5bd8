"""Requests to a server, repeated where that is safe."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote, urlencode
from weakref import WeakSet

from smokebox.client.answering import (
    Answer,
    Unconnected,
    deadline,
    event_failure,
    failure_of,
    is_lost,
    losing,
    unreachable,
    value_of,
)
from smokebox.client.body import encoded
from smokebox.client.connection import Connections
from smokebox.errors import SandboxGone
from smokebox.foundation import sse
from smokebox.wire import API, IDEMPOTENCY_KEY

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        AsyncIterator,
        Awaitable,
        Callable,
        Mapping,
    )

    from smokebox.client.connection import Address
    from smokebox.client.http_client import StreamedResponse
    from smokebox.client.socket import Socket

T = TypeVar("T")


class Channel(Protocol):
    """What keeps a connection open by itself."""

    async def aclose(self) -> None:
        """Close it."""
        ...


REQUEST_SECONDS = 60.0
_ATTEMPTS = 5
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_SAFE = frozenset(("GET", "HEAD", "PUT", "DELETE"))
# Longer than this nobody is made to wait without being asked.
_LONGEST_WAIT = 60.0
_BUSY, _UNAVAILABLE = 429, 503
_LATER = (_BUSY, _UNAVAILABLE)
_JSON = {"content-type": "application/json"}
_BYTES = {"content-type": "application/octet-stream"}


class Transport:
    """Sends requests to one server, all below `prefix`. `revive` is called when nobody is there
    to answer."""

    def __init__(
        self,
        address: Address,
        key: str | None = None,
        *,
        revive: Callable[[], Awaitable[None]] | None = None,
        prefix: str = API,
    ) -> None:
        self.address = address
        self._prefix = prefix
        self.connections = Connections(address, key)
        self.channels: WeakSet[Channel] = WeakSet()
        self._revive = revive

    async def ask(
        self,
        answer: type[T],
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        repeat_key: str | None = None,
        timeout: float | None = REQUEST_SECONDS,
    ) -> T:
        """Send a request and give its answer, as `answer` (NoneType for nothing).

        `timeout` is for all attempts; without one the server must show signs of life. A
        request that changes something is sent once, unless it is safe to repeat or has a
        `repeat_key`.
        """
        headers = {} if body is None else _JSON
        if repeat_key is not None:
            headers = {**headers, IDEMPOTENCY_KEY: repeat_key}
        target, data = self._target(path, query), encoded(body)
        safe = repeat_key is not None or method in _SAFE
        if timeout is None:
            got = await self._repeatedly(self._once, method, target, data, headers, safe=safe)
        else:
            async with deadline(timeout, f"{method} {path}"):
                got = await self._repeatedly(self._once, method, target, data, headers, safe=safe)
        return value_of(answer, got)

    async def upload(
        self,
        answer: type[T],
        method: str,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        query: Mapping[str, Any] | None = None,
        repeatable: bool = True,
    ) -> T:
        """Send bytes of any amount; those that can be sent again are, if need be."""
        safe = repeatable and method in _SAFE and isinstance(data, bytes)
        target = self._target(path, query)
        got = await self._repeatedly(self._once, method, target, data, _BYTES, safe=safe)
        return value_of(answer, got)

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[StreamedResponse]:
        """An answer that is read as it comes. Raises what the server refused it with."""
        target, data = self._target(path, query), encoded(body)
        headers = {**(headers or {}), **({} if data is None else _JSON)}
        async with contextlib.AsyncExitStack() as stack:

            async def once(
                method: str, target: str, data: bytes | None, headers: Mapping[str, str]
            ) -> Answer | StreamedResponse:
                http = (await self.connections.pool()).http
                with losing(target):
                    streaming = http.stream(method, target, data, headers)
                    response = await stack.enter_async_context(streaming)
                    return response if response.status < 400 else await response.read_all()

            got = await self._repeatedly(once, method, target, data, headers, safe=method in _SAFE)
            if isinstance(got, Answer):
                raise failure_of(got)
            yield got

    async def events(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[sse.Event, None]:
        """The events of an answer, to its end. An event that is an error is raised."""
        async with self.open(method, path, query=query, body=body, headers=headers) as response:
            reader = sse.EventReader()
            while data := await _read(response, path):
                for event in reader.feed(data):
                    if event.name == "error":
                        raise event_failure(event.data)
                    yield event

    async def bytes_of(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of an answer as they come."""
        async with self.open("GET", path, query=query, headers=headers) as response:
            while data := await _read(response, path):
                yield data

    @contextlib.asynccontextmanager
    async def connect(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        heartbeat: float,
        again: bool = True,
    ) -> AsyncIterator[Socket]:
        """A WebSocket, whose other side is asked every `heartbeat` seconds whether it lives.

        One that is refused raises `Refused`. Unless `again` there is one attempt,
        which starts no server: `Unconnected` says that nobody was there.
        """

        async def once(_method: str, target: str, _data: object, _headers: object) -> Socket:
            with losing(path):
                return await (await self.connections.pool()).socket(target, heartbeat)

        target = self._target(path, query)
        if again:
            socket = await self._repeatedly(once, "GET", target, None, {}, safe=True)
        else:
            socket = await once("GET", target, None, {})
        async with contextlib.aclosing(socket):
            yield socket

    async def aclose(self) -> None:
        """Close the connections of this event loop; the next request opens others."""
        for channel in list(self.channels):
            await channel.aclose()
        await self.connections.aclose()

    def _target(self, path: str, query: Mapping[str, Any] | None) -> str:
        """What is asked for: a path, whose parts are quoted, and a query."""
        target = self._prefix + path
        return f"{target}?{urlencode(_plain(query), quote_via=quote)}" if query else target

    async def _once(
        self,
        method: str,
        target: str,
        data: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
    ) -> Answer:
        http = (await self.connections.pool()).http
        with losing(target):
            return await http.request(method, target, data, headers)

    async def _repeatedly(
        self,
        once: Callable[[str, str, Any, Mapping[str, str]], Awaitable[T]],
        method: str,
        target: str,
        data: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
        *,
        safe: bool,
    ) -> T:
        pause, revived = _FIRST_PAUSE, False
        for left in range(_ATTEMPTS - 1, -1, -1):
            try:
                got = await once(method, target, data, headers)
                wait = _wait(got, data, safe=safe)
                if wait is None or not left:
                    return got
                pause = max(pause, wait)
            except Unconnected as error:
                # Nobody was there: nothing was sent.
                if self._revive is not None and not revived:
                    revived = True
                    await self._revive()
                    continue
                if not left or self._revive is not None:
                    raise unreachable(self.address, error) from error
            except SandboxGone as error:
                if not left or not safe or not is_lost(error):
                    raise
            await asyncio.sleep(pause * (1 + random.random() / 4))
            pause = min(pause * 2, _LONGEST_PAUSE)
        raise AssertionError("unreachable")


async def _read(response: StreamedResponse, path: str) -> bytes:
    with losing(path):
        return await response.read()


def _wait(got: object, data: object, *, safe: bool) -> float | None:
    """How long to wait before another attempt; None for no other."""
    if not isinstance(got, Answer) or got.status not in _LATER:
        return None
    if got.retry_after is None:
        return 0.0 if safe and got.status == _UNAVAILABLE else None
    # Nothing was done when the server says when to come back.
    again = got.retry_after <= _LONGEST_WAIT and (data is None or isinstance(data, bytes))
    return got.retry_after if again else None


def _plain(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A query as text: what is None is left out, a list is given once for each."""
    pairs: list[tuple[str, str]] = []
    for name, value in query.items():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, bool):
                pairs.append((name, "true" if one else "false"))
            elif one is not None:
                pairs.append((name, str(one)))
    return pairs
