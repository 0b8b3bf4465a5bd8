"""A WebSocket to what listens in a sandbox."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from smokebox.client.tunnel import tunnel
from smokebox.errors import InvalidOption, ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from websockets.asyncio.client import ClientConnection

    from smokebox.client.handle import Handle

_OPEN_SECONDS = 30.0


class WebSocket:
    """Messages to and from a server in a sandbox: str for text, bytes for the rest.

    Iterating over it gives what comes until it is closed. Made by `Sandbox.ws_connect`.
    """

    def __init__(self, inner: ClientConnection, stack: contextlib.AsyncExitStack) -> None:
        self._inner = inner
        self._stack = stack

    @property
    def subprotocol(self) -> str | None:
        """What both agreed on."""
        return self._inner.subprotocol

    async def send(self, message: str | bytes) -> None:
        """Send a message."""
        with _lost():
            await self._inner.send(message)

    async def recv(self) -> str | bytes:
        """The next message. Raises `ServiceUnavailable` once it is closed."""
        with _lost():
            return await self._inner.recv()

    async def aclose(self) -> None:
        """Close it. Safe to repeat."""
        await self._stack.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str | bytes:
        try:
            return await self.recv()
        except ServiceUnavailable:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def open_websocket(
    sandbox: Handle,
    port: int,
    path: str,
    *,
    headers: Mapping[str, str] | None,
    subprotocols: Sequence[str] | None,
) -> WebSocket:
    """Connect. See `Sandbox.ws_connect`."""
    # It takes half as long to import as the rest of the SDK.
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException
    from websockets.typing import Subprotocol

    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise InvalidOption(
            f"port is a whole number from 1 to 65535, not {port!r:.80}.",
            hint="Pass for example port=8080.",
            option="port",
            value=port,
        )
    if not path.startswith("/"):
        raise InvalidOption(
            f"path begins with a slash, unlike {path!r:.80}.",
            hint=f"Pass path='/{path}'.",
            option="path",
            value=path,
        )
    async with contextlib.AsyncExitStack() as stack:
        sock, carrying = await stack.enter_async_context(tunnel(sandbox, port))
        try:
            inner = await connect(
                f"ws://localhost:{port}{path}",
                sock=sock,
                additional_headers=dict(headers or {}),
                subprotocols=[Subprotocol(one) for one in subprotocols or ()] or None,
                open_timeout=_OPEN_SECONDS,
                max_size=None,
                proxy=None,
            )
        except (OSError, EOFError, WebSocketException) as error:
            if carrying.done() and not carrying.cancelled():
                carrying.result()
            raise ServiceUnavailable(
                f"port {port} of sandbox {sandbox.id} does not take a WebSocket at {path}: "
                f"{error}.",
                hint="Is that its path? See the log of what listens there.",
                service="port",
            ) from error
        stack.push_async_callback(inner.close)
        return WebSocket(inner, stack.pop_all())


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    from websockets.exceptions import ConnectionClosed

    try:
        yield
    except ConnectionClosed as error:
        raise ServiceUnavailable(
            f"the WebSocket is closed: {error}.",
            hint="Connect again with ws_connect().",
            service="port",
            reason="closed",
        ) from error
