"""What those see who watch conversations and runs: read once, however many they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from smokebox.errors import SmokeboxError
from smokebox.wire.sse import encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from smokebox.agents.log.records import Stored
    from smokebox.agents.log.store import SessionKey, Store
    from smokebox.app.inbox import Inbox, Note

_log = logging.getLogger("smokebox.app")

# What is held for those who keep up; who does not reads from the store.
_HELD_BYTES = 1 << 20
_HELD = 2000
_PAGE = 500
_FIRST_PAGE = 16
_READ = 1 << 17
_CHUNK = 1 << 16


class Line:
    """One event: its offset, its kind, and its JSON."""

    __slots__ = ("_event", "data", "kind", "offset")

    def __init__(self, offset: int, kind: str, data: bytes) -> None:
        self.offset = offset
        self.kind = kind
        self.data = data
        self._event: bytes | None = None

    @property
    def event(self) -> bytes:
        """It as it is sent, made once for all who watch."""
        if self._event is None:
            self._event = encode(self.kind, self.data, str(self.offset))
        return self._event


def line_of(stored: Stored) -> Line:
    """A record as an event."""
    # A record is never empty: it has a type at least.
    fields = msgspec.json.encode(stored.record)[1:]
    data = b'{"offset":%d,"at":%r,%b' % (stored.offset, stored.at, fields)
    kind = stored.record.__struct_config__.tag
    return Line(stored.offset, str(kind), data)


def noted(note: Note) -> Line:
    """A note as an event."""
    told = msgspec.json.decode(note.data)
    kind = told.pop("event")
    data = msgspec.json.encode({"offset": note.place, "at": note.at, "type": kind, **told})
    return Line(note.place, kind, data)


class Source(Protocol):
    """What there is to watch. Equal ones are the same."""

    async def head(self) -> int:
        """The offset of the last that there is."""
        ...

    async def read(self, after: int, limit: int) -> Sequence[Line]:
        """What lies behind an offset."""
        ...

    def follow(self, after: int) -> AsyncGenerator[Line, None]:
        """The same, then what is added, until nothing ever will be."""
        ...


@dataclass(frozen=True, slots=True)
class Records:
    """A conversation, by its record."""

    store: Store
    key: SessionKey

    async def head(self) -> int:
        """The offset of the last record."""
        found = await self.store.sessions(agent=self.key.agent, id=self.key.id)
        return next((one.head for one in found if one.key == self.key), 0)

    async def read(self, after: int, limit: int) -> Sequence[Line]:
        """What lies behind an offset."""
        return [line_of(one) for one in await self.store.read(self.key, after=after, limit=limit)]

    async def follow(self, after: int) -> AsyncGenerator[Line, None]:
        """The same, then what is added, until the conversation is removed."""
        async with contextlib.aclosing(self.store.follow(self.key, after=after)) as records:
            async for stored in records:
                yield line_of(stored)


@dataclass(frozen=True, slots=True)
class Notes:
    """A submission, by what was noted of it."""

    inbox: Inbox
    id: str

    async def head(self) -> int:
        """The place of the last note."""
        return await self.inbox.last_note(self.id)

    async def read(self, after: int, limit: int) -> Sequence[Line]:
        """What lies behind an offset."""
        return [noted(one) for one in await self.inbox.notes(self.id, after=after, limit=limit)]

    async def follow(self, after: int) -> AsyncGenerator[Line, None]:
        """The same, then what is added, until the submission has ended."""
        async with contextlib.aclosing(self.inbox.follow(self.id, after=after)) as notes:
            async for note in notes:
                yield noted(note)


class Stream:
    """The events of one source, while somebody watches it."""

    def __init__(self, source: Source) -> None:
        self.readers = 0
        self._source = source
        # Events behind this offset are in `_held`, those up to it only in the store: at first
        # all that there are. None until that is known.
        self._base: int | None = None
        self._held: deque[Line] = deque()
        self._size = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._ended = False
        self._pump = asyncio.create_task(self._run())

    async def read(self, after: int, limit: int = _PAGE) -> Sequence[Line] | None:
        """What comes behind an offset, once there is something; None when nothing ever will.

        `limit` is for what is no longer held: nobody else has the memory that it takes.
        """
        while True:
            if self._base is not None and after < self._base:
                # None where it was deleted, and begun anew by somebody.
                return await self._source.read(after, limit) or None
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

    async def _run(self) -> None:
        try:
            self._base = head = await self._source.head()
            self._wake()
            async with contextlib.aclosing(self._source.follow(head)) as lines:
                async for line in lines:
                    self._hold(line)
        except SmokeboxError as error:
            # The app is being stopped, or the disk is broken: who watches comes again.
            _log.info("a stream ended early: %s", error)
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

    def __init__(self) -> None:
        self._open: dict[Source, Stream] = {}

    @contextlib.asynccontextmanager
    async def watch(self, source: Source) -> AsyncIterator[Stream]:
        """The stream of a source, followed from before anything is read of it."""
        stream = self._open.get(source)
        if stream is None or stream._ended:
            stream = self._open[source] = Stream(source)
        stream.readers += 1
        try:
            yield stream
        finally:
            stream.readers -= 1
            if not stream.readers:
                if self._open.get(source) is stream:
                    del self._open[source]
                await stream.aclose()

    async def lines(self, source: Source, after: int) -> AsyncGenerator[Line, None]:
        """Events behind an offset, then those that are added."""
        async with contextlib.aclosing(self._pages(source, after)) as pages:
            async for page in pages:
                for line in page:
                    yield line

    async def events(self, source: Source, after: int) -> AsyncGenerator[bytes, None]:
        """The same as they are sent: what there is at once goes out together."""
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

    async def _pages(self, source: Source, after: int) -> AsyncGenerator[Sequence[Line], None]:
        limit = _FIRST_PAGE
        async with self.watch(source) as stream:
            while (found := await stream.read(after, limit)) is not None:
                yield found
                after = found[-1].offset
                size = sum(len(line.data) for line in found) // len(found)
                # As many of that size as one who is behind may take memory for.
                limit = max(1, min(_PAGE, _READ // size))
