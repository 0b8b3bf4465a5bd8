"""Requests to a server, and what becomes of them: values, streams, or errors of their class."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from smokebox.client.connection import Connections
from smokebox.errors import (
    DeadlineExceeded,
    LimitReached,
    SandboxGone,
    ServiceUnavailable,
    SmokeboxError,
)
from smokebox.wire import API, IDEMPOTENCY_KEY, sse
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, FailureAnswer, error_of

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterator,
        Mapping,
    )

    from smokebox.client.connection import Address

T = TypeVar("T")

REQUEST_SECONDS = 60.0
_ATTEMPTS = 5
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_SAFE = ("GET", "HEAD", "PUT", "DELETE")


class Transport:
    """Sends requests to one server. `revive` is called when nobody is there to answer."""

    def __init__(
        self,
        address: Address,
        key: str | None = None,
        *,
        revive: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.connections = Connections(address, key)
        self._revive = revive

    async def ask(
        self,
        answer: type[T],
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: msgspec.Struct | None = None,
        repeat_key: str | None = None,
        timeout: float | None = REQUEST_SECONDS,
    ) -> T:
        """Send a request and give its answer, as `answer` (None for nothing).

        `timeout` is for all attempts. A request that changes something is sent once, unless
        it is safe to repeat or has a `repeat_key`.
        """
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"content-type": "application/json"}
        if repeat_key is not None:
            headers[IDEMPOTENCY_KEY] = repeat_key
        safe = method in _SAFE or repeat_key is not None

        async def once() -> T:
            async with self._send(method, path, query, data, headers) as response:
                return _decoded(answer, response.status, await response.read())

        async with deadline(timeout, f"{method} {path}"):
            return await self._repeatedly(once, safe=safe)

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: msgspec.Struct | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is read as it comes. Raises what the server refused it with."""
        data = None if body is None else msgspec.json.encode(body)
        sent = {"content-type": "application/json"} if data is not None else {}
        async with contextlib.AsyncExitStack() as stack:

            async def once() -> aiohttp.ClientResponse:
                request = self._send(method, path, query, data, {**sent, **(headers or {})})
                response = await stack.enter_async_context(request)
                if response.status >= 400:
                    raise _failure(response.status, await response.read())
                return response

            yield await self._repeatedly(once, safe=method in _SAFE)

    async def upload(
        self,
        answer: type[T],
        method: str,
        path: str,
        pieces: AsyncIterator[bytes] | bytes,
        *,
        query: Mapping[str, Any] | None = None,
    ) -> T:
        """Send bytes of any amount; those that can be sent again are, if need be."""
        headers = {"content-type": "application/octet-stream"}

        async def once() -> T:
            async with self._send(method, path, query, pieces, headers) as response:
                return _decoded(answer, response.status, await response.read())

        return await self._repeatedly(once, safe=isinstance(pieces, bytes))

    async def events(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: msgspec.Struct | None = None,
    ) -> AsyncGenerator[sse.Event, None]:
        """The events of an answer, to its end. An event that is an error is raised."""
        async with self.open(method, path, query=query, body=body) as response:
            reader = sse.Reader()
            with lost(path):
                async for data in response.content.iter_any():
                    for event in reader.feed(data):
                        if event.name == "error":
                            raise error_of(msgspec.json.decode(event.data, type=Failure))
                        yield event

    async def bytes_of(
        self, path: str, *, query: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of an answer as they come."""
        async with self.open("GET", path, query=query) as response:
            with lost(path):
                async for data in response.content.iter_any():
                    yield data

    async def _repeatedly(self, once: Callable[[], Awaitable[T]], *, safe: bool) -> T:
        pause, revived = _FIRST_PAUSE, False
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                return await once()
            except aiohttp.ClientConnectorError as error:
                # Nobody was there: nothing was sent.
                if self._revive is not None and not revived:
                    revived = True
                    await self._revive()
                    continue
                if last or self._revive is not None:
                    raise _unreachable(self.connections.address, error) from error
            except (ServiceUnavailable, LimitReached) as error:
                if last or not safe:
                    raise
                pause = max(pause, float(error.fields.get("retry_after") or 0))  # type: ignore[arg-type]
            except SandboxGone as error:
                if last or not safe or error.fields.get("reason") != LOST:
                    raise
            await asyncio.sleep(pause * (1 + random.random() / 4))
            pause = min(pause * 2, _LONGEST_PAUSE)
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        data: AsyncIterator[bytes] | bytes | None,
        headers: Mapping[str, str],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        session = await self.connections.session()
        with lost(path):
            async with session.request(
                method,
                self.connections.address.base + API + path,
                params=_plain(query) if query else None,
                data=data,
                headers=headers,
                allow_redirects=False,
            ) as response:
                yield response


LOST = "connection lost"


@contextlib.contextmanager
def lost(path: str) -> Iterator[None]:
    """Turn what aiohttp says of a connection that broke into our own error."""
    try:
        yield
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        if isinstance(error, SmokeboxError):
            raise
        raise SandboxGone(
            f"the server went away during {path}.",
            hint="Call again: the sandbox keeps its files, and its long-running processes.",
            reason=LOST,
        ) from error


@contextlib.asynccontextmanager
async def deadline(timeout: float | None, what: str) -> AsyncIterator[None]:
    """Raise `DeadlineExceeded` for what takes longer than `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout) as scope:
            yield
    except TimeoutError as error:
        if isinstance(error, SmokeboxError) or not scope.expired():
            raise
        raise DeadlineExceeded(
            f"{what} was not answered in {timeout:g} s.",
            hint="Pass a longer timeout, or look at the server with `smokebox status`.",
            operation=what,
            timeout=timeout,
        ) from None


def _decoded(answer: type[T], status: int, data: bytes) -> T:
    if status >= 400 or (status == 200 and b'"error"' in data[:256] and _is_failure(data)):
        raise _failure(status, data)
    if answer is type(None):
        return None
    try:
        return decode(answer, data)
    except msgspec.MsgspecError as error:
        raise ServiceUnavailable(
            f"the server answered what this client does not understand: {error}.",
            hint="Have both of the same version: see `smokebox --version` on either side.",
            service="server",
        ) from error


def _is_failure(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=FailureAnswer)
    except msgspec.MsgspecError:
        return False
    return True


def _failure(status: int, data: bytes) -> SmokeboxError:
    try:
        return error_of(msgspec.json.decode(data, type=FailureAnswer).error)
    except msgspec.MsgspecError:
        return ServiceUnavailable(
            f"what is at that address answered {status}, not as a Smokebox server does.",
            hint="Check SMOKEBOX_URL.",
            service="server",
        )


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


def _unreachable(address: Address, error: aiohttp.ClientConnectorError) -> ServiceUnavailable:
    where = address.socket or address.base
    return ServiceUnavailable(
        f"no server answers at {where}: {error.strerror or error}.",
        hint="Start one with `smokebox up`, or set SMOKEBOX_URL to where it is.",
        service="server",
    )
