"""The contract of a store of event logs, and what every store shares."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smokebox.agents.log.records import (
    MessageAdded,
    SessionCreated,
    ToolEnded,
    WorkAccepted,
    WorkEnded,
)
from smokebox.agents.messages import Image
from smokebox.errors import Conflict, Fenced, NotFound, SessionBusy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence

    from smokebox.agents.log.records import Record, StoredRecord


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """Which session: of which agent, of which instance of it, by which name."""

    agent: str
    id: str
    session: str

    def __str__(self) -> str:
        return f"{self.agent}/{self.id}/{self.session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """What a list of sessions shows. `unfinished` is how much accepted work has no end.

    `parent` is the name of the session whose task this one does.
    """

    key: SessionKey
    created_at: float
    updated_at: float
    head: int
    unfinished: int
    parent: str | None = None


class SessionWriter(Protocol):
    """The right to add to one session, until another takes it."""

    @property
    def key(self) -> SessionKey:
        """Which session."""
        ...

    @property
    def head(self) -> int:
        """The offset of the last record, 0 before the first."""
        ...

    async def append(self, records: Sequence[Record]) -> int:
        """Add records, all or none; they are durable when it returns the new head.

        Appends take effect in the order of the calls. One that is cancelled takes effect all
        the same, but who called cannot know when. Raises `Fenced` once another writer has
        taken the session, or it was deleted.
        """
        ...

    async def release(self) -> None:
        """Give the right back. Safe to repeat."""
        ...


class SessionStore(Protocol):
    """Sessions and their records."""

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> SessionWriter:
        """Become the writer of a session, which need not be there yet.

        One whose writer is alive raises `SessionBusy` (after `wait` seconds of trying); one
        whose writer has died is taken over at once where that can be known, else when its
        lease is over.
        """
        ...

    async def read(
        self, key: SessionKey, *, after: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Records behind an offset, in order; none for a session that is not there."""
        ...

    def follow(self, key: SessionKey, *, after: int = 0) -> AsyncGenerator[StoredRecord, None]:
        """Records behind an offset, then those that are added, without gap or repeat.

        Those that another process adds too. Waits for a session that is not there yet, and ends
        when one is deleted. A slow reader holds nobody up, and takes no memory.
        """
        ...

    async def sessions(
        self, *, agent: str | None = None, id: str | None = None, limit: int = 1000
    ) -> list[SessionSummary]:
        """Sessions that have records, those that changed last first."""
        ...

    async def delete(self, key: SessionKey) -> bool:
        """Remove a session with its records and children; False where there is none.

        Their writers are `Fenced` from then on. Raises `Conflict` while a fork needs the records.
        """
        ...

    async def put_blob(self, data: bytes) -> str:
        """Keep bytes beside the records; gives their name, the same for the same bytes."""
        ...

    async def get_blob(self, name: str) -> bytes:
        """The bytes of that name. Raises `NotFound`."""
        ...

    async def aclose(self) -> None:
        """Let go of it; what was added stays."""
        ...


@dataclass(frozen=True, slots=True)
class LogChange:
    """How much more work waits, whose session it is, and which blobs are of it now."""

    unfinished: int
    parent: str | None
    forked_from: str | None
    blobs: frozenset[str]


def change_of(records: Sequence[Record]) -> LogChange:
    """What these records change."""
    unfinished = 0
    parent = forked_from = None
    blobs: set[str] = set()
    for record in records:
        match record:
            case WorkAccepted():
                unfinished += 1
            case WorkEnded():
                unfinished -= 1
            case SessionCreated():
                parent, forked_from = record.parent, record.forked_from
        blobs.update(image.blob for image in _images(record))
    return LogChange(unfinished, parent, forked_from, frozenset(blobs))


def _images(record: Record) -> Iterator[Image]:
    match record:
        case ToolEnded():
            yield from record.result.images
        case MessageAdded() | WorkAccepted() if record.message is not None:
            yield from (part for part in record.message.parts if isinstance(part, Image))


class Wakeups:
    """Events of followers, which may be of several event loops; set from any thread."""

    def __init__(self) -> None:
        self._events: dict[Hashable, dict[asyncio.Event, asyncio.AbstractEventLoop]] = {}

    @contextlib.contextmanager
    def listen(self, key: Hashable) -> Iterator[asyncio.Event]:
        """An event that is set whenever something happens to the session."""
        event = asyncio.Event()
        self._events.setdefault(key, {})[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            listeners = self._events[key]
            del listeners[event]
            if not listeners:
                del self._events[key]

    def wake(self, key: Hashable) -> None:
        """Something happened to a session."""
        for event, loop in list(self._events.get(key, {}).items()):
            # The loop may be gone, and with it whoever listened.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    def wake_all(self) -> None:
        """Something may have happened to any of them."""
        for key in list(self._events):
            self.wake(key)


def busy(key: SessionKey, owner: str) -> SessionBusy:
    """What to say to whoever would write to a session that has a writer."""
    return SessionBusy(
        f"session {key} is in use by {owner}.",
        hint="Wait until it is done there, or use another session name.",
        session=str(key),
    )


def fenced(key: SessionKey) -> Fenced:
    """What to say to a writer that has lost its session."""
    return Fenced(
        f"session {key} was deleted, or another writer has taken it: nothing more is written.",
        hint="Open the session again to go on from what is recorded.",
        session=str(key),
    )


def no_blob(name: str) -> NotFound:
    """What to say when bytes are asked for that are not there."""
    return NotFound(f"the store has no blob {name}.", hint="", kind="blob", name=name)


def has_forks(key: SessionKey, forks: Sequence[str]) -> Conflict:
    """What to say when a session cannot go because others begin with its records."""
    return Conflict(
        f"session {key} cannot be deleted: {', '.join(sorted(forks))} was forked from it.",
        hint="Delete the fork first.",
        kind="session",
        name=str(key),
    )


def closed(place: str) -> Conflict:
    """What to say when a store is used after it was closed."""
    return Conflict(
        f"the store {place} was closed.",
        hint="Open it again with open_store().",
        kind="store",
        name=place,
    )
