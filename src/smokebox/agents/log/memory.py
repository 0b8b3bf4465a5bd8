"""Session store in memory, which ends with the process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.agents.log.records import StoredRecord, change_of
from smokebox.agents.log.store import (
    SessionKey,
    SessionSummary,
    Wakeups,
    busy,
    closed,
    fenced,
    follow_records,
    has_forks,
    no_blob,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from smokebox.agents.log.records import Record

_RETRY = 0.02


@dataclass(slots=True, eq=False)
class _StoredSession:
    created_at: float
    records: list[StoredRecord] = field(default_factory=list)
    unfinished: int = 0
    parent: str | None = None
    forked_from: str | None = None
    blobs: set[str] = field(default_factory=set)
    writer: MemoryWriter | None = None


class MemoryWriter:
    """Writer of a session in memory."""

    def __init__(self, store: MemoryStore, key: SessionKey, session: _StoredSession) -> None:
        self._store = store
        self._key = key
        self._session = session

    @property
    def head(self) -> int:
        """Offset of the last record, 0 before the first."""
        return len(self._session.records)

    async def append(self, records: Sequence[Record]) -> int:
        """Append records, and return the new head."""
        session, now = self._session, time.time()
        if session.writer is not self:
            raise fenced(self._key)
        change = change_of(records)
        session.records += [
            StoredRecord(self.head + n, now, record) for n, record in enumerate(records, 1)
        ]
        session.unfinished += change.unfinished
        session.parent = change.parent or session.parent
        session.forked_from = change.forked_from or session.forked_from
        session.blobs |= change.blobs
        session.blobs -= change.dropped
        self._store._forget(change.dropped)
        self._store._wakeups.wake(self._key)
        return self.head

    async def release(self) -> None:
        """Allow another writer. Safe to repeat."""
        if self._session.writer is self:
            self._session.writer = None
            if not self._session.records:
                self._store._sessions.pop(self._key, None)


class MemoryStore:
    """Session store that ends with the process."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, _StoredSession] = {}
        self._blobs: dict[str, bytes] = {}
        self._wakeups = Wakeups()

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> MemoryWriter:
        """Become the writer of a session, which need not exist."""
        deadline = time.monotonic() + wait
        while True:
            self._check_open()
            session = self._sessions.setdefault(key, _StoredSession(created_at=time.time()))
            if session.writer is None:
                session.writer = MemoryWriter(self, key, session)
                return session.writer
            if time.monotonic() >= deadline:
                raise busy(key, "this process")
            await asyncio.sleep(_RETRY)

    async def read(
        self, key: SessionKey, *, after: int = 0, limit: int = 1000
    ) -> list[StoredRecord]:
        """Return the records after an offset."""
        self._check_open()
        session = self._sessions.get(key)
        return [] if session is None else session.records[after : after + limit]

    def follow(self, key: SessionKey, *, after: int = 0) -> AsyncGenerator[StoredRecord, None]:
        """Yield the records after an offset, then new ones."""

        async def find() -> tuple[_StoredSession | None, int]:
            session = self._sessions.get(key)
            return session, 0 if session is None else len(session.records)

        async def read(after: int, limit: int) -> list[StoredRecord]:
            return await self.read(key, after=after, limit=limit)

        return follow_records(self._wakeups, key, find=find, read=read, after=after, poll=None)

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
            if session.records
            and agent in (None, key.agent)
            and id in (None, key.id)
            and key.id.startswith(prefix)
        ]
        return sorted(found, key=lambda summary: summary.updated_at, reverse=True)[:limit]

    async def delete(self, key: SessionKey) -> bool:
        """Delete a session with its records and child sessions; False if it does not exist."""
        self._check_open()
        if key not in self._sessions:
            return False
        siblings = {
            other.session: session
            for other, session in self._sessions.items()
            if (other.agent, other.id) == (key.agent, key.id)
        }
        names = [key.session]
        for name in names:
            names += [
                other
                for other, session in siblings.items()
                if session.parent == name and other not in names
            ]
        if forks := [
            str(SessionKey(key.agent, key.id, other))
            for other, session in siblings.items()
            if session.forked_from in names and other not in names
        ]:
            raise has_forks(key, forks)
        unused: set[str] = set()
        for name in names:
            deleted = SessionKey(key.agent, key.id, name)
            session = self._sessions.pop(deleted)
            session.writer = None
            unused |= session.blobs
            self._wakeups.wake(deleted)
        self._forget(unused)
        return True

    def _forget(self, blobs: Iterable[str]) -> None:
        """Drop those of the blobs that no session needs."""
        used = {blob for session in self._sessions.values() for blob in session.blobs}
        for blob in {*blobs} - used:
            self._blobs.pop(blob, None)

    async def put_blob(self, data: bytes) -> str:
        """Store bytes, and return their name."""
        self._check_open()
        name = hashlib.sha256(data).hexdigest()
        self._blobs[name] = bytes(data)
        return name

    async def get_blob(self, name: str) -> bytes:
        """Return the bytes that `put_blob` stored. Raises `NotFound`."""
        self._check_open()
        try:
            return self._blobs[name]
        except KeyError:
            raise no_blob(name) from None

    async def aclose(self) -> None:
        """Close the store."""
        self._wakeups.close()

    def _check_open(self) -> None:
        if self._wakeups.closed:
            raise closed("in memory")
