"""WebSockets to a server: what is said in both directions, and that somebody is there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from smokebox import wire
from smokebox.client.answering import Broken, Refused, Unconnected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from websockets.asyncio.client import ClientConnection


class Socket:
    """Messages to and from a server: str for text, bytes for the rest.

    Iterating over it gives what comes, until the connection ends in whichever way.
    """

    def __init__(self, inner: ClientConnection) -> None:
        self._inner = inner

    async def send(self, message: str | bytes) -> None:
        """Send a message. Raises `Broken` once it cannot be."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._inner.send(message)
        except ConnectionClosed as error:
            raise Broken(str(error)) from error

    async def aclose(self) -> None:
        """End it."""
        await self._inner.close()

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            while True:
                yield await self._inner.recv()


async def open_socket(
    url: str, by: Mapping[str, Any], headers: Mapping[str, str], *, heartbeat: float
) -> Socket:
    """Connect to a URL; `by` is what the event loop is told of the way.

    The other side is asked every `heartbeat` seconds whether it lives. Raises `Unconnected`,
    `Broken` or `Refused`.
    """
    # Imported here, as most need none.
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    try:
        inner = await connect(
            url.replace("http", "ws", 1),
            additional_headers=headers,
            user_agent_header=None,
            compression=None,
            proxy=None,
            max_size=None,
            open_timeout=wire.SILENCE,
            ping_interval=heartbeat,
            ping_timeout=heartbeat / 2,
            **by,
        )
    except InvalidStatus as error:
        answer = error.response
        raise Refused(answer.status_code, answer.reason_phrase) from error
    except (TimeoutError, InvalidHandshake) as error:
        raise Broken(str(error) or "the server says nothing") from error
    except OSError as error:
        raise Unconnected(error.strerror or str(error)) from error
    return Socket(inner)
