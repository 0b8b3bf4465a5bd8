"""Requests to a server, retried where that is safe, with errors as the server's own classes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote, urlencode
from weakref import WeakSet

import msgspec

from smokebox import __version__
from smokebox.client.http_client import (
    BufferedResponse,
    ConnectFailed,
    HttpClients,
    is_connection_lost,
)
from smokebox.errors import (
    DeadlineExceeded,
    InvalidOption,
    SandboxGone,
    ServiceUnavailable,
    SmokeboxError,
)
from smokebox.foundation import sse
from smokebox.wire import API, IDEMPOTENCY_KEY
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, FailureResponse, error_of

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        AsyncIterator,
        Awaitable,
        Callable,
        Mapping,
    )

    from smokebox.client.address import Address
    from smokebox.client.handler_channel import HandlerChannel
    from smokebox.client.http_client import ApiWebSocket, HttpClient, StreamedResponse
    from smokebox.types import LayerProgress
    from smokebox.wire.builds import BuildEvent

T = TypeVar("T")

ImageProgress: TypeAlias = "Callable[[BuildEvent | LayerProgress], None]"
"""Called with the progress of an image that a sandbox needs, which is built or loaded."""

REQUEST_SECONDS = 60.0
_ATTEMPTS = 5
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 5.0
# A server that asks for a longer pause is not retried.
_MAX_RETRY_AFTER = 60.0
_SAFE = frozenset(("GET", "HEAD", "PUT", "DELETE"))
_TOO_MANY_REQUESTS, _UNAVAILABLE = 429, 503
_JSON = {"content-type": "application/json"}
_BYTES = {"content-type": "application/octet-stream"}


class Transport:
    """Sends requests to one server.

    Args:
        address: Address of the server.
        key: API key to send.
        start_server: Called once when nothing listens at the address, before another attempt.
        prefix: Path before the path of every request.
    """

    def __init__(
        self,
        address: Address,
        key: str | None = None,
        *,
        start_server: Callable[[], Awaitable[None]] | None = None,
        prefix: str = API,
    ) -> None:
        self.address = address
        self.http_clients = HttpClients(address, key)
        self.handler_channels: WeakSet[HandlerChannel] = WeakSet()
        self.image_progress: ImageProgress | None = None
        self._start_server = start_server
        self._prefix = prefix

    async def request(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        data: bytes | AsyncIterable[bytes] | None = None,
        idempotency_key: str | None = None,
        retry: bool = True,
        timeout: float | None = REQUEST_SECONDS,
    ) -> T:
        """Send a request and decode the response as `kind` (NoneType to ignore it).

        After a lost connection it is sent again if that is safe: a GET, PUT or DELETE whose
        content is not a stream, or a request with an idempotency key.

        Args:
            kind: Type to decode the response as.
            method: Method.
            path: Path below the prefix, quoted.
            query: Parameters; None leaves one out, a list repeats it.
            body: Content to send as JSON.
            data: Content to send as it is, instead of `body`.
            idempotency_key: Key by which the server recognises a repeated request.
            retry: False if the request must not be sent twice.
            timeout: Seconds for all attempts. With None, the server must send heartbeats.
        """
        headers: Mapping[str, str] = {}
        if data is not None:
            headers = _BYTES
        elif body is not None:
            headers, data = _JSON, _encode(body)
        if idempotency_key is not None:
            headers = {**headers, IDEMPOTENCY_KEY: idempotency_key}
        target = self._target(path, query)
        repeatable = data is None or isinstance(data, bytes)
        sending = self._retry(
            lambda http: http.request(method, target, data, headers),
            safe=retry and repeatable and (idempotency_key is not None or method in _SAFE),
            repeatable=repeatable,
        )
        if timeout is None:
            return _decode(kind, await sending)
        async with deadline(timeout, f"{method} {path}"):
            return _decode(kind, await sending)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[StreamedResponse]:
        """Send a request and yield its response, to be read as it arrives.

        Raises:
            SmokeboxError: The error of a response with status 400 or above.
        """
        target, data = self._target(path, query), None
        headers = dict(headers or {})
        if body is not None:
            data = _encode(body)
            headers |= _JSON
        async with contextlib.AsyncExitStack() as stack:

            async def send(http: HttpClient) -> BufferedResponse | StreamedResponse:
                streaming = http.stream(method, target, data, headers)
                response = await stack.enter_async_context(streaming)
                return response if response.status < 400 else await response.read_all()

            response = await self._retry(send, safe=method in _SAFE)
            if isinstance(response, BufferedResponse):
                raise _response_error(response)
            yield response

    async def events(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[sse.Event, None]:
        """Send a request and yield the events of its response. An error event is raised."""
        async with self.stream(method, path, query=query, body=body, headers=headers) as response:
            reader = sse.EventReader()
            while data := await response.read():
                for event in reader.feed(data):
                    if event.name == "error":
                        raise error_of(decode(Failure, event.data))
                    yield event

    async def download(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Send a GET request and yield the bytes of its response."""
        async with self.stream("GET", path, query=query, headers=headers) as response:
            while data := await response.read():
                yield data

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, *, heartbeat: float, retry: bool = True
    ) -> AsyncIterator[ApiWebSocket]:
        """Open a WebSocket that pings the server every `heartbeat` seconds.

        Args:
            path: Path below the prefix.
            heartbeat: Seconds between pings.
            retry: False for one attempt that does not start a server.

        Raises:
            WebSocketRefused: The server refused it.
            ConnectFailed: Without `retry`: no connection could be opened.
        """
        target = self._prefix + path
        if retry:
            socket = await self._retry(
                lambda http: http.websocket(target, heartbeat=heartbeat), safe=True
            )
        else:
            http = await self.http_clients.current()
            socket = await http.websocket(target, heartbeat=heartbeat)
        async with contextlib.aclosing(socket):
            yield socket

    async def aclose(self) -> None:
        """Close the connections of this event loop; the next request opens others."""
        for channel in list(self.handler_channels):
            await channel.aclose()
        await self.http_clients.aclose()

    def _target(self, path: str, query: Mapping[str, Any] | None) -> str:
        target = self._prefix + path
        return f"{target}?{urlencode(_parameters(query), quote_via=quote)}" if query else target

    async def _retry(
        self,
        send: Callable[[HttpClient], Awaitable[T]],
        *,
        safe: bool,
        repeatable: bool = True,
    ) -> T:
        """Send a request until it succeeds, fails for good, or all attempts are used.

        Args:
            send: Sends the request once.
            safe: The request may be sent again if it is unknown whether it was received.
            repeatable: The content can be sent twice, unlike a stream.
        """
        pause, started = _FIRST_PAUSE, False
        for remaining in range(_ATTEMPTS - 1, -1, -1):
            try:
                response = await send(await self.http_clients.current())
                retry_after = _retry_after(response, safe=safe, repeatable=repeatable)
                if retry_after is None or not remaining:
                    return response
                pause = max(pause, retry_after)
            except ConnectFailed as error:
                if self._start_server is not None and not started:
                    started = True
                    await self._start_server()
                    continue
                if not remaining or self._start_server is not None:
                    raise ServiceUnavailable(
                        f"no server responds at {self.address.socket or self.address.base}: "
                        f"{error}.",
                        hint="Start one with `smokebox up`, or set SMOKEBOX_URL to its address.",
                        service="server",
                    ) from error
            except SandboxGone as error:
                if not remaining or not safe or not is_connection_lost(error):
                    raise
            await asyncio.sleep(pause * (1 + random.random() / 4))
            pause = min(pause * 2, _MAX_PAUSE)
        raise AssertionError("unreachable")


@contextlib.asynccontextmanager
async def deadline(timeout: float, operation: str) -> AsyncIterator[None]:
    """Raise `DeadlineExceeded` if the block takes longer than `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout) as scope:
            yield
    except TimeoutError as error:
        if isinstance(error, SmokeboxError) or not scope.expired():
            raise
        raise DeadlineExceeded(
            f"{operation} timed out after {timeout:g} s.",
            hint="Pass a longer timeout, or check the server with `smokebox status`.",
            operation=operation,
            timeout=timeout,
        ) from None


def _retry_after(response: object, *, safe: bool, repeatable: bool) -> float | None:
    """Return the seconds to wait before another attempt; None if the response is final."""
    if not isinstance(response, BufferedResponse):
        return None
    if response.status not in (_TOO_MANY_REQUESTS, _UNAVAILABLE):
        return None
    if response.retry_after is None:
        return 0.0 if safe and response.status == _UNAVAILABLE else None
    # A server that sends Retry-After has done nothing, so any request may be repeated.
    again = repeatable and response.retry_after <= _MAX_RETRY_AFTER
    return response.retry_after if again else None


def _encode(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise InvalidOption(
            f"{error.object[:80]!r} holds a character that UTF-8 cannot encode, at {error.start}.",
            hint="Leave it out, or write bytes to a file.",
            option="body",
        ) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOption(
            f"a value cannot be sent to the server: {error}.",
            hint="Pass text, numbers, lists and mappings.",
            option="body",
        ) from error


def _decode(kind: type[T], response: BufferedResponse) -> T:
    """Decode a response, or raise the error that it reports."""
    status, body = response.status, response.body
    # Heartbeats of a slow response are empty lines before its body.
    if body.startswith(b"\n"):
        body = body.lstrip()
    if status >= 400:
        raise _response_error(response)
    # A request that fails after its first heartbeat has status 200 and an error as its body.
    if status == 200 and b'"error"' in body[:256] and (failure := _failure(body)) is not None:
        raise error_of(failure)
    if kind is type(None):
        return None
    try:
        return decode(kind, body)
    except msgspec.MsgspecError as error:
        raise ServiceUnavailable(
            f"the server sent a response that this client cannot decode: {error}.",
            hint=_versions(response)
            or "Install the same version on both sides; `smokebox --version` shows it.",
            service="server",
        ) from error


def _response_error(response: BufferedResponse) -> SmokeboxError:
    failure = _failure(response.body)
    if failure is not None:
        if _is_unknown(failure) and (versions := _versions(response)):
            failure.hint = f"{failure.hint} {versions}".lstrip()
        return error_of(failure)
    return ServiceUnavailable(
        f"a response with status {response.status} is not that of a Smokebox server.",
        hint="Check SMOKEBOX_URL.",
        service="server",
        status=response.status,
    )


def _is_unknown(failure: Failure) -> bool:
    """Tell whether the server does not know a path, a method or a field of the request."""
    if failure.code == "invalid_option":
        texts = ("has no option", "unknown field", "has no field")
        return any(text in failure.message for text in texts)
    kind = failure.fields.get("kind")
    return failure.code == "method_not_allowed" or (failure.code, kind) == ("not_found", "path")


def _versions(response: BufferedResponse) -> str:
    """Say that the versions of both sides differ; nothing if they do not."""
    if response.version in (None, __version__):
        return ""
    return (
        f"The server is version {response.version}, and this client {__version__}: "
        "install the same version on both sides."
    )


def _failure(body: bytes) -> Failure | None:
    try:
        return decode(FailureResponse, body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _parameters(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in query.items():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, bool):
                pairs.append((name, "true" if one else "false"))
            elif one is not None:
                pairs.append((name, str(one)))
    return pairs
