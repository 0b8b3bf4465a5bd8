"""What changes in the files of a sandbox, as it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from smokebox.client.resuming import resumed
from smokebox.types import WatchEvent
from smokebox.wire.codec import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from smokebox.client.handle import Handle
    from smokebox.wire.sse import Event

_LIVE = "watching"


class Watch(AsyncIterator[WatchEvent]):
    """Changes from `async for`, until what is watched is removed or moved away.

    `cursor` is where a later watch goes on. A lost connection is made anew, and nothing is
    missed; where that cannot be, an event of the kind `resync` says so.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self.cursor: str | None = None
        self._events = events

    @classmethod
    async def start(
        cls,
        sandbox: Handle,
        path: str,
        *,
        recursive: bool,
        include: Sequence[str],
        exclude: Sequence[str] | None,
        cursor: str | None,
    ) -> Self:
        """A watch that is live."""
        # A list without anything in it is given as one empty name: a query has no other way.
        query = {
            "path": path,
            "recursive": recursive,
            "include": list(include),
            "exclude": None if exclude is None else list(exclude) or "",
            "cursor": cursor,
        }
        watch = cls(resumed(sandbox, "/watch", query))
        try:
            await watch._next()
        except BaseException:
            await watch.aclose()
            raise
        return watch

    async def __anext__(self) -> WatchEvent:
        while True:
            event = await self._next()
            if event.name != _LIVE:
                return decode(WatchEvent, event.data)

    async def aclose(self) -> None:
        """Stop watching."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next(self) -> Event:
        event = await anext(self._events)
        self.cursor = event.id or self.cursor
        return event
