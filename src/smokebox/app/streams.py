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
    from smokebox.app.inbox import AppInbox, SubmissionEvent

_log = logging.getLogger("smokebox.app")

# Limits of recent events kept for watchers that keep up; slower ones read from the store.
_RECENT_BYTES = 1 << 20
_RECENT_EVENTS = 2000
_PAGE = 500
_FIRST_PAGE = 16
# Bytes of a page for a slow watcher, and of a chunk sent to any.
_PAGE_BYTES = 1 << 17
_CHUNK_BYTES = 1 << 16


class StreamEvent:
    """An event of a stream, as JSON."""

    __slots__ = ("_encoded", "data", "kind", "offset")

    def __init__(self, offset: int, kind: str, data: bytes) -> None:
        self.offset = offset
        self.kind = kind
        self.data = data
        self._encoded: bytes | None = None

    @property
    def encoded(self) -> bytes:
        """The event as encoded for SSE, once for all watchers."""
        if self._encoded is None:
            self._encoded = encode(self.kind, self.data, str(self.offset))
        return self._encoded


def record_event(stored: StoredRecord) -> StreamEvent:
    """Return a record of a conversation as an event of its stream."""
    # A record is never empty: it has at least a type.
    fields = msgspec.json.encode(stored.record)[1:]
    data = b'{"offset":%d,"at":%r,%b' % (stored.offset, stored.at, fields)
    kind = stored.record.__struct_config__.tag
    return StreamEvent(stored.offset, str(kind), data)


def submission_event(stored: SubmissionEvent) -> StreamEvent:
    """Return an event of a submission as an event of its stream."""
    fields = msgspec.json.decode(stored.data)
    kind = fields.pop("event")
    data = msgspec.json.encode({"offset": stored.offset, "at": stored.at, "type": kind, **fields})
    return StreamEvent(stored.offset, kind, data)


class EventSource(Protocol):
    """Source of a stream of events. Sources that compare equal share a stream."""

    async def head(self) -> int:
        """Return the offset of the last event."""
        ...

    async def read(self, after: int, limit: int) -> Sequence[StreamEvent]:
        """Return the events after an offset."""
        ...

    def follow(self, after: int) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events after an offset, then new ones until the source ends."""
        ...


@dataclass(frozen=True, slots=True)
class ConversationEvents:
    """Events of a conversation, from its records."""

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
    """Events of a submission, from the inbox."""

    inbox: AppInbox
    id: str

    async def head(self) -> int:
        """Return the offset of the last event."""
        return await self.inbox.last_offset(self.id)

    async def read(self, after: int, limit: int) -> Sequence[StreamEvent]:
        """Return the events after an offset."""
        return [
            submission_event(one)
            for one in await self.inbox.events(self.id, after=after, limit=limit)
        ]

    async def follow(self, after: int) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events after an offset, then new ones until the submission ends."""
        async with contextlib.aclosing(self.inbox.follow(self.id, after=after)) as events:
            async for event in events:
                yield submission_event(event)


class EventStream:
    """Events of one source while it has watchers."""

    def __init__(self, source: EventSource) -> None:
        self.watchers = 0
        self._source = source
        # Events after this offset are in `_recent`, earlier ones only in the store. None until
        # the last offset of the source is known.
        self._base: int | None = None
        self._recent: deque[StreamEvent] = deque()
        self._size = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._ended = False
        self._follower = asyncio.create_task(self._run())

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
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed

    async def aclose(self) -> None:
        """Stop reading."""
        self._follower.cancel()
        await asyncio.wait([self._follower])

    def _since(self, after: int) -> list[StreamEvent]:
        recent = self._recent
        if not recent or recent[-1].offset <= after:
            return []
        # Offsets have no gaps.
        first = max(0, after + 1 - recent[0].offset)
        return [recent[index] for index in range(first, len(recent))]

    async def _run(self) -> None:
        try:
            self._base = head = await self._source.head()
            self._wake()
            async with contextlib.aclosing(self._source.follow(head)) as events:
                async for event in events:
                    self._add(event)
        except SmokeboxError as error:
            # The app is stopping, or the disk failed: watchers reconnect.
            _log.info("a stream ended early: %s", error)
        finally:
            self._ended = True
            self._wake()

    def _add(self, event: StreamEvent) -> None:
        recent = self._recent
        recent.append(event)
        self._size += len(event.data)
        while len(recent) > 1 and (self._size > _RECENT_BYTES or len(recent) > _RECENT_EVENTS):
            oldest = recent.popleft()
            self._size -= len(oldest.data)
            self._base = oldest.offset
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
        """Yield the stream of a source, which is followed before anything is read from it."""
        stream = self._open.get(source)
        if stream is None or stream._ended:
            stream = self._open[source] = EventStream(source)
        stream.watchers += 1
        try:
            yield stream
        finally:
            stream.watchers -= 1
            if not stream.watchers:
                if self._open.get(source) is stream:
                    del self._open[source]
                await stream.aclose()

    async def events(self, source: EventSource, after: int) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events after an offset, then new ones."""
        async with contextlib.aclosing(self._pages(source, after)) as pages:
            async for page in pages:
                for event in page:
                    yield event

    async def chunks(self, source: EventSource, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after an offset, then new ones, encoded for SSE.

        Events that are available at once are in one chunk.
        """
        async with contextlib.aclosing(self._pages(source, after)) as pages:
            async for page in pages:
                pieces, size = [], 0
                for event in page:
                    pieces.append(event.encoded)
                    size += len(event.encoded)
                    if size >= _CHUNK_BYTES:
                        yield b"".join(pieces)
                        pieces, size = [], 0
                if pieces:
                    yield b"".join(pieces)

    async def _pages(
        self, source: EventSource, after: int
    ) -> AsyncGenerator[Sequence[StreamEvent], None]:
        limit = _FIRST_PAGE
        async with self.watch(source) as stream:
            while (page := await stream.read(after, limit)) is not None:
                yield page
                after = page[-1].offset
                size = sum(len(event.data) for event in page) // len(page)
                limit = max(1, min(_PAGE, _PAGE_BYTES // size))
