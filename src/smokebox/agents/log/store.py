"""Contract of a store of event logs, and code that the stores share."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smokebox.errors import Conflict, Fenced, NotFound, SessionBusy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Sequence

    from smokebox.agents.log.records import Record, StoredRecord

_PAGE = 500


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """Key of a session: the agent's name, the id of the instance, and the session's name."""

    agent: str
    id: str
    session: str

    def __str__(self) -> str:
        return f"{self.agent}/{self.id}/{self.session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """Entry of a list of sessions. `unfinished` counts work items that have not ended.

    `parent` is the name of the session whose task this one does.
    """

    key: SessionKey
    created_at: float
    updated_at: float
    head: int
    unfinished: int
    parent: str | None = None


class SessionWriter(Protocol):
    """Exclusive right to append to one session."""

    @property
    def head(self) -> int:
        """Offset of the last record, 0 before the first."""
        ...

    async def append(self, records: Sequence[Record]) -> int:
        """Append records, all or none, and return the new head once they are durable.

        Appends take effect in the order of the calls. A cancelled append still takes effect,
        but the caller cannot tell when.

        Raises:
            Fenced: Another writer has taken over the session, or it was deleted.
        """
        ...

    async def release(self) -> None:
        """Allow another writer. Safe to repeat."""
        ...


class SessionStore(Protocol):
    """Sessions with their records and blobs."""

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> SessionWriter:
        """Become the writer of a session, which need not exist.

        A session whose writer has died is taken over at once if the store can tell, otherwise
        when the lease of that writer has expired.

        Raises:
            SessionBusy: Another writer is alive, and still was after `wait` seconds.
        """
        ...

    async def read(
        self, key: SessionKey, *, after: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Return the records after an offset, in order; none if the session does not exist."""
        ...

    def follow(self, key: SessionKey, *, after: int = 0) -> AsyncGenerator[StoredRecord, None]:
        """Yield the records after an offset, then new ones as any process appends them.

        There are no gaps and no repeats. Waits for a session that does not exist, and ends
        when the session is deleted. A slow reader delays no writer and takes no memory.
        """
        ...

    async def sessions(
        self,
        *,
        agent: str | None = None,
        id: str | None = None,
        prefix: str = "",
        limit: int = 1000,
    ) -> list[SessionSummary]:
        """List the sessions that have records, the one that changed last first.

        With `prefix`, only those whose ids begin with it.
        """
        ...

    async def delete(self, key: SessionKey) -> bool:
        """Delete a session with its records and child sessions; False if it does not exist.

        Writers of these sessions are fenced.

        Raises:
            Conflict: A fork needs the records.
        """
        ...

    async def put_blob(self, data: bytes) -> str:
        """Store bytes, and return their name; equal bytes have the same name."""
        ...

    async def get_blob(self, name: str) -> bytes:
        """Return the bytes that `put_blob` stored. Raises `NotFound`."""
        ...

    async def aclose(self) -> None:
        """Close the store."""
        ...


class Wakeups:
    """Wakes followers of sessions, which may belong to several event loops, from any thread."""

    def __init__(self) -> None:
        self.closed = False
        self._events: dict[Hashable, dict[asyncio.Event, asyncio.AbstractEventLoop]] = {}

    @contextlib.contextmanager
    def listen(self, key: Hashable) -> Iterator[asyncio.Event]:
        """Return an event that `wake` sets for this key."""
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
        """Wake the followers of one key."""
        for event, loop in list(self._events.get(key, {}).items()):
            # A closed loop has no followers left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    def wake_all(self) -> None:
        """Wake all followers."""
        for key in list(self._events):
            self.wake(key)

    def close(self) -> None:
        """End all followers."""
        self.closed = True
        self.wake_all()


async def follow_records(
    wakeups: Wakeups,
    token: Hashable,
    *,
    find: Callable[[], Awaitable[tuple[object, int]]],
    read: Callable[[int, int], Awaitable[list[StoredRecord]]],
    after: int,
    poll: float | None,
) -> AsyncGenerator[StoredRecord, None]:
    """Implement `SessionStore.follow`.

    Args:
        wakeups: Sets the event of `token` when the session has changed.
        find: Returns the identity of the session, None if it does not exist, and its head.
        read: Returns records, given an offset and a limit.
        after: The offset to start after.
        poll: Seconds between checks for changes that `wakeups` does not see, None for never.
    """
    followed: object = None
    with wakeups.listen(token) as changed:
        while not wakeups.closed:
            changed.clear()
            session, head = await find()
            if followed is not None and session != followed:
                return
            # A session without records may disappear before it gets any.
            followed = session if head else None
            if head > after:
                for stored in await read(after, _PAGE):
                    yield stored
                    after = stored.offset
            else:
                # Not wait_for: before Python 3.12 it can swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(poll):
                        await changed.wait()


def busy(key: SessionKey, owner: str) -> SessionBusy:
    """Return the error for opening a session that has a writer."""
    return SessionBusy(
        f"session {key} is in use by {owner}.",
        hint="Wait until it is done there, or use another session name.",
        session=str(key),
    )


def fenced(key: SessionKey) -> Fenced:
    """Return the error for a writer that has lost its session."""
    return Fenced(
        f"session {key} was deleted, or another writer has taken it: nothing more is written.",
        hint="Open the session again to continue from its records.",
        session=str(key),
    )


def no_blob(name: str) -> NotFound:
    """Return the error for a blob that does not exist."""
    return NotFound(f"the store has no blob {name}.", hint="", kind="blob", name=name)


def has_forks(key: SessionKey, forks: Sequence[str]) -> Conflict:
    """Return the error for deleting a session whose records forks need."""
    return Conflict(
        f"session {key} cannot be deleted: {', '.join(sorted(forks))} was forked from it.",
        hint="Delete the fork first.",
        kind="session",
        name=str(key),
    )


def closed(place: str) -> Conflict:
    """Return the error for using a store that was closed."""
    return Conflict(
        f"the store {place} was closed.",
        hint="Open it again with open_store().",
        kind="store",
        name=place,
    )
