"""Changes of files in a sandbox, as an async iterator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from smokebox.types import WatchEvent
from smokebox.wire.codec import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.foundation.sse import Event

# Name of the first event, sent when the watch is active.
_STARTED = "watching"


class Watch(AsyncIterator[WatchEvent]):
    """Changes below a path, until that is removed or moved away. `Sandbox.watch` creates it.

    `cursor` is where a later watch can continue. After a lost connection it reconnects
    without missing anything; where that is impossible, it yields an event of kind `resync`.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self.cursor: str | None = None
        self._events = events

    async def __anext__(self) -> WatchEvent:
        while True:
            event = await self._next()
            if event.name != _STARTED:
                return decode(WatchEvent, event.data)

    async def aclose(self) -> None:
        """Stop watching."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _start(self) -> None:
        """Wait until the watch is active."""
        try:
            await self._next()
        except BaseException:
            await self.aclose()
            raise

    async def _next(self) -> Event:
        event = await anext(self._events)
        self.cursor = event.id or self.cursor
        return event
