"""Sessions that are kept in memory, and end with the process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.agents.log.records import StoredRecord
from smokebox.agents.log.store import (
    SessionKey,
    SessionSummary,
    Wakeups,
    busy,
    change_of,
    closed,
    fenced,
    has_forks,
    no_blob,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from smokebox.agents.log.records import Record

_RETRY = 0.02
_PAGE = 500


@dataclass(slots=True)
class _Session:
    created_at: float
    records: list[StoredRecord] = field(default_factory=list)
    unfinished: int = 0
    parent: str | None = None
    forked_from: str | None = None
    blobs: set[str] = field(default_factory=set)
    writer: MemoryWriter | None = None


class MemoryWriter:
    """The right to add to a session in memory."""

    def __init__(self, store: MemoryStore, key: SessionKey, session: _Session) -> None:
        self._store = store
        self._key = key
        self._session = session

    @property
    def key(self) -> SessionKey:
        """Which session."""
        return self._key

    @property
    def head(self) -> int:
        """The offset of the last record, 0 before the first."""
        return len(self._session.records)

    async def append(self, records: Sequence[Record]) -> int:
        """Add records, all or none."""
        session, now = self._session, time.time()
        if session.writer is not self:
            raise fenced(self._key)
        change = change_of(records)
        session.records += [
            StoredRecord(self.head + n, now, one) for n, one in enumerate(records, 1)
        ]
        session.unfinished += change.unfinished
        session.parent = change.parent or session.parent
        session.forked_from = change.forked_from or session.forked_from
        session.blobs |= change.blobs
        self._store._wakes.wake(self._key)
        return self.head

    async def release(self) -> None:
        """Give the right back. Safe to repeat."""
        if self._session.writer is self:
            self._session.writer = None
            if not self._session.records:
                self._store._sessions.pop(self._key, None)


class MemoryStore:
    """A store that ends with the process."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, _Session] = {}
        self._blobs: dict[str, bytes] = {}
        self._wakes = Wakeups()
        self._closed = False

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> MemoryWriter:
        """Become the writer of a session, which need not be there yet."""
        deadline = time.monotonic() + wait
        while True:
            self._check_open()
            session = self._sessions.setdefault(key, _Session(created_at=time.time()))
            if session.writer is None:
                session.writer = MemoryWriter(self, key, session)
                return session.writer
            if time.monotonic() >= deadline:
                raise busy(key, "this process")
            await asyncio.sleep(_RETRY)

    async def read(
        self, key: SessionKey, *, after: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Records behind an offset, in order; none for a session that is not there."""
        self._check_open()
        session = self._sessions.get(key)
        return [] if session is None else session.records[after : after + limit]

    async def follow(
        self, key: SessionKey, *, after: int = 0
    ) -> AsyncGenerator[StoredRecord, None]:
        """Records behind an offset, then those that are added."""
        followed: _Session | None = None
        with self._wakes.listen(key) as more:
            while not self._closed:
                more.clear()
                session = self._sessions.get(key)
                if followed is not None and session is not followed:
                    return
                # One without records may vanish before it has any.
                followed = session if session is not None and session.records else None
                page = [] if followed is None else followed.records[after : after + _PAGE]
                for stored in page:
                    yield stored
                after += len(page)
                if not page:
                    await more.wait()

    async def sessions(
        self, *, agent: str | None = None, id: str | None = None, limit: int = 1000
    ) -> list[SessionSummary]:
        """Sessions that have records, those that changed last first."""
        self._check_open()
        found = [
            SessionSummary(
                key=key,
                created_at=session.created_at,
                updated_at=session.records[-1].at,
                head=len(session.records),
                unfinished=session.unfinished,
                parent=session.parent,
            )
            for key, session in self._sessions.items()
            if session.records and agent in (None, key.agent) and id in (None, key.id)
        ]
        return sorted(found, key=lambda one: one.updated_at, reverse=True)[:limit]

    async def delete(self, key: SessionKey) -> bool:
        """Remove a session with its records and children; False where there is none."""
        self._check_open()
        if key not in self._sessions:
            return False
        going = self._family(key)
        beside = {one: of for one, of in self._sessions.items() if _near(one, key)}
        needed = {one.session for one in going}
        if forks := [
            str(one) for one, of in beside.items() if of.forked_from in needed and one not in going
        ]:
            raise has_forks(key, forks)
        unused: set[str] = set()
        for one in going:
            session = self._sessions.pop(one)
            session.writer = None
            unused |= session.blobs
        unused.difference_update(*(session.blobs for session in self._sessions.values()))
        for name in unused:
            self._blobs.pop(name, None)
        for one in going:
            self._wakes.wake(one)
        return True

    async def put_blob(self, data: bytes) -> str:
        """Keep bytes beside the records; gives their name, the same for the same bytes."""
        self._check_open()
        name = hashlib.sha256(data).hexdigest()
        self._blobs[name] = bytes(data)
        return name

    async def get_blob(self, name: str) -> bytes:
        """The bytes of that name. Raises `NotFound`."""
        self._check_open()
        try:
            return self._blobs[name]
        except KeyError:
            raise no_blob(name) from None

    async def aclose(self) -> None:
        """Let go of it; with the last reference what was added goes too."""
        self._closed = True
        self._wakes.wake_all()

    def _family(self, key: SessionKey) -> list[SessionKey]:
        found = [key]
        for one in found:
            found += [
                other
                for other, of in self._sessions.items()
                if of.parent == one.session and _near(other, key) and other not in found
            ]
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise closed("in memory")


def _near(one: SessionKey, other: SessionKey) -> bool:
    return (one.agent, one.id) == (other.agent, other.id)
