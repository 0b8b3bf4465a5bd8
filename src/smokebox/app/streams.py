"""Conversations as those see them who watch: read from the store once, however many they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from smokebox.agents.log.records import Stored
    from smokebox.agents.log.store import SessionKey, Store

# What is held for those who keep up; who does not reads from the store.
_HELD_BYTES = 1 << 20
_HELD = 2000
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Line:
    """One event: its offset, its kind, and its JSON."""

    offset: int
    kind: str
    data: bytes


def line_of(stored: Stored) -> Line:
    """A record as an event."""
    plain: dict[str, Any] = msgspec.to_builtins(stored.record)
    kind = plain["type"]
    data = msgspec.json.encode({"offset": stored.offset, "at": stored.at, **plain})
    return Line(stored.offset, kind, data)


class Stream:
    """The events of one conversation, while somebody watches it."""

    def __init__(self, store: Store, key: SessionKey, after: int) -> None:
        self.readers = 0
        self._store = store
        self._key = key
        # Events behind this offset are in `_held`, those up to it only in the store.
        self._base = after
        self._held: deque[Line] = deque()
        self._size = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._ended = False
        self._pump = asyncio.create_task(self._run(after))

    async def read(self, after: int) -> Sequence[Line] | None:
        """What comes behind an offset, once there is something; None when nothing ever will."""
        while True:
            if after < self._base:
                page = await self._store.read(self._key, after=after, limit=_PAGE)
                if page:
                    return [line_of(stored) for stored in page]
                # Deleted, and begun anew by somebody.
                return None
            found = self._since(after)
            if found or self._ended:
                return found or None
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(more)
            await more

    async def aclose(self) -> None:
        """Read no more."""
        self._pump.cancel()
        await asyncio.wait([self._pump])

    def _since(self, after: int) -> list[Line]:
        held = self._held
        if not held or held[-1].offset <= after:
            return []
        # Offsets have no gaps.
        first = max(0, after + 1 - held[0].offset)
        return [held[place] for place in range(first, len(held))]

    async def _run(self, after: int) -> None:
        try:
            async with contextlib.aclosing(self._store.follow(self._key, after=after)) as records:
                async for stored in records:
                    self._hold(line_of(stored))
        finally:
            self._ended = True
            self._wake()

    def _hold(self, line: Line) -> None:
        self._held.append(line)
        self._size += len(line.data)
        while len(self._held) > 1 and (self._size > _HELD_BYTES or len(self._held) > _HELD):
            gone = self._held.popleft()
            self._size -= len(gone.data)
            self._base = gone.offset
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


class Streams:
    """Those that somebody watches, each once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[SessionKey, Stream] = {}

    @contextlib.asynccontextmanager
    async def watch(self, key: SessionKey, after: int) -> AsyncIterator[Stream]:
        """The stream of a conversation, followed from before anything is read of it."""
        stream = self._open.get(key)
        if stream is None or stream._ended:
            stream = self._open[key] = Stream(self._store, key, after)
        stream.readers += 1
        try:
            yield stream
        finally:
            stream.readers -= 1
            if not stream.readers:
                if self._open.get(key) is stream:
                    del self._open[key]
                await stream.aclose()

    async def lines(self, key: SessionKey, after: int) -> AsyncGenerator[Line, None]:
        """Events behind an offset, then those that are added."""
        async with self.watch(key, after) as stream:
            while (found := await stream.read(after)) is not None:
                for line in found:
                    yield line
                    after = line.offset
