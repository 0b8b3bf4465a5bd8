"""Event streams of conversations and runs: each is read once for all of its watchers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from smokebox.errors import SmokeboxError
from smokebox.foundation.sse import encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from smokebox.agents.log.records import StoredRecord
    from smokebox.agents.log.store import SessionKey, SessionStore
    from smokebox.app.inbox import AppInbox, Note

_log = logging.getLogger("smokebox.app")

# Bytes of recent events held for watchers that keep up; slower ones read from the store.
_HELD_BYTES = 1 << 20
_HELD = 2000
_PAGE = 500
_FIRST_PAGE = 16
_READ = 1 << 17
_CHUNK = 1 << 16


class StreamEvent:
    """One event: its offset, its kind and its JSON."""

    __slots__ = ("_event", "data", "kind", "offset")

    def __init__(self, offset: int, kind: str, data: bytes) -> None:
        self.offset = offset
        self.kind = kind
        self.data = data
        self._event: bytes | None = None

    @property
    def event(self) -> bytes:
        """Return the event as encoded for SSE, once for all watchers."""
        if self._event is None:
            self._event = encode(self.kind, self.data, str(self.offset))
        return self._event


def record_event(stored: StoredRecord) -> StreamEvent:
    """Return a record as an event."""
    # A record is never empty: it has at least a type.
    fields = msgspec.json.encode(stored.record)[1:]
    data = b'{"offset":%d,"at":%r,%b' % (stored.offset, stored.at, fields)
    kind = stored.record.__struct_config__.tag
    return StreamEvent(stored.offset, str(kind), data)


def note_event(note: Note) -> StreamEvent:
    """Return a note as an event."""
    told = msgspec.json.decode(note.data)
    kind = told.pop("event")
    data = msgspec.json.encode({"offset": note.place, "at": note.at, "type": kind, **told})
    return StreamEvent(note.place, kind, data)


class EventSource(Protocol):
    """A source of events to watch. Sources that compare equal share a stream."""

    async def head(self) -> int:
        """Return the offset of the last event."""
        ...

    async def read(self, after: int, limit: int) -> Sequence[StreamEvent]:
        """Return the events after an offset."""
        ...

    def follow(self, after: int) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events after an offset, then new ones until there can be no more."""
        ...


@dataclass(frozen=True, slots=True)
class ConversationEvents:
    """Events of a conversation, from its record."""

    store: SessionStore
    key: SessionKey

    async def head(self) -> int:
        """Return the offset of the last record."""
        found = await self.store.sessions(agent=self.key.agent, id=self.key.id)
        return next((one.head for one in found if one.key == self.key), 0)

    async def read(self, after: int, limit: int) -> Sequence[StreamEvent]:
        """Return the events after an offset."""
        return [
            record_event(one) for one in await self.store.read(self.key, after=after, limit=limit)
        ]

    async def follow(self, after: int) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events after an offset, then new ones until the conversation is deleted."""
        async with contextlib.aclosing(self.store.follow(self.key, after=after)) as records:
            async for stored in records:
                yield record_event(stored)


@dataclass(frozen=True, slots=True)
class SubmissionEvents:
    """Events of a submission, from its notes."""

    inbox: AppInbox
    id: str

    async def head(self) -> int:
        """Return the place of the last note."""
        return await self.inbox.last_note(self.id)

    async def read(self, after: int, limit: int) -> Sequence[StreamEvent]:
        """Return the events after an offset."""
        return [
            note_event(one) for one in await self.inbox.notes(self.id, after=after, limit=limit)
        ]

    async def follow(self, after: int) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events after an offset, then new ones until the submission ends."""
        async with contextlib.aclosing(self.inbox.follow(self.id, after=after)) as notes:
            async for note in notes:
                yield note_event(note)


class EventStream:
    """Events of one source while it has watchers."""

    def __init__(self, source: EventSource) -> None:
        self.readers = 0
        self._source = source
        # Events after this offset are in `_held`, earlier ones only in the store: at first all of
        # them. None until it is known.
        self._base: int | None = None
        self._held: deque[StreamEvent] = deque()
        self._size = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._ended = False
        self._pump = asyncio.create_task(self._run())

    async def read(self, after: int, limit: int = _PAGE) -> Sequence[StreamEvent] | None:
        """Return the events after an offset, waiting for the first; None if there will be no more.

        `limit` applies to events read from the store, which take memory for this watcher alone.
        """
        while True:
            if self._base is not None and after < self._base:
                # None after the source was deleted and created again.
                return await self._source.read(after, limit) or None
            found = self._since(after)
            if found or self._ended:
                return found or None
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(more)
            await more

    async def aclose(self) -> None:
        """Stop reading."""
        self._pump.cancel()
        await asyncio.wait([self._pump])

    def _since(self, after: int) -> list[StreamEvent]:
        held = self._held
        if not held or held[-1].offset <= after:
            return []
        # Offsets have no gaps.
        first = max(0, after + 1 - held[0].offset)
        return [held[place] for place in range(first, len(held))]

    async def _run(self) -> None:
        try:
            self._base = head = await self._source.head()
            self._wake()
            async with contextlib.aclosing(self._source.follow(head)) as lines:
                async for line in lines:
                    self._hold(line)
        except SmokeboxError as error:
            # The app is stopping, or the disk failed: watchers reconnect.
            _log.info("a stream ended early: %s", error)
        finally:
            self._ended = True
            self._wake()

    def _hold(self, line: StreamEvent) -> None:
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


class EventStreams:
    """Streams that have watchers, one for each source."""

    def __init__(self) -> None:
        self._open: dict[EventSource, EventStream] = {}

    @contextlib.asynccontextmanager
    async def watch(self, source: EventSource) -> AsyncIterator[EventStream]:
        """Return the stream of a source. It is followed before anything is read from it."""
        stream = self._open.get(source)
        if stream is None or stream._ended:
            stream = self._open[source] = EventStream(source)
        stream.readers += 1
        try:
            yield stream
        finally:
            stream.readers -= 1
            if not stream.readers:
                if self._open.get(source) is stream:
                    del self._open[source]
                await stream.aclose()

    async def lines(self, source: EventSource, after: int) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events after an offset, then new ones."""
        async with contextlib.aclosing(self._pages(source, after)) as pages:
            async for page in pages:
                for line in page:
                    yield line

    async def events(self, source: EventSource, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the same, encoded: events available at once are sent together."""
        async with contextlib.aclosing(self._pages(source, after)) as pages:
            async for page in pages:
                pieces, size = [], 0
                for line in page:
                    pieces.append(line.event)
                    size += len(line.event)
                    if size >= _CHUNK:
                        yield b"".join(pieces)
                        pieces, size = [], 0
                if pieces:
                    yield b"".join(pieces)

    async def _pages(
        self, source: EventSource, after: int
    ) -> AsyncGenerator[Sequence[StreamEvent], None]:
        limit = _FIRST_PAGE
        async with self.watch(source) as stream:
            while (found := await stream.read(after, limit)) is not None:
                yield found
                after = found[-1].offset
                size = sum(len(line.data) for line in found) // len(found)
                # Page size for a slow watcher, which bounds its memory.
                limit = max(1, min(_PAGE, _READ // size))
