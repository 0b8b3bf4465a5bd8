"""The record of one session as this process knows it, and the right to add to it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from smokebox.agents.log.conversation import Conversation
from smokebox.agents.log.records import StoredRecord
from smokebox.errors import SmokeboxError
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from smokebox.agents.log.records import Record
    from smokebox.agents.log.store import SessionKey, SessionStore, SessionWriter


_PAGE = 1000


class EventLog:
    """Adds records to a session, and keeps the conversation that they make up.

    Records given to `add` go out with the next `flush`, in one commit with all others that
    wait. What was flushed is durable, and part of `conversation`. `live` is whether others read
    the record while it grows, and want an answer as it comes.
    """

    def __init__(self, store: SessionStore, key: SessionKey) -> None:
        self.key = key
        self.store = store
        self.conversation = Conversation()
        self.live = False
        self._writer: SessionWriter | None = None
        self._waiting: list[Record] = []
        self._added = 0
        self._written = 0
        self._failure: Exception | None = None
        self._lock = asyncio.Lock()
        self._door = asyncio.Lock()

    @property
    def head(self) -> int:
        """The offset of the last record that is known here."""
        return self.conversation.head

    @property
    def held(self) -> bool:
        """Whether this process may add to the session."""
        return self._writer is not None

    async def reload(self) -> None:
        """Take in the whole record, and what comes before it in a fork."""
        self.conversation = await Conversation.load(self.store, self.key)

    async def refresh(self) -> None:
        """Take in what was recorded since."""
        if self.head == 0:
            await self.reload()
            return
        while page := await self.store.read(self.key, after=self.head, limit=_PAGE):
            for stored in page:
                self.conversation.apply(stored)

    async def acquire(self, *, wait: float = 0.0) -> None:
        """Become the writer of the session, and know all of its record.

        Raises `SessionBusy` where another process is.
        """
        async with self._door:
            if self._writer is None:
                await run_to_completion(self._open(wait))

    async def _open(self, wait: float) -> None:
        writer = await self.store.open(self.key, wait=wait)
        self._waiting.clear()
        self._written, self._failure = self._added, None
        try:
            if writer.head != self.head:
                await self.refresh()
        except BaseException:
            await writer.release()
            raise
        self._writer = writer

    async def release(self) -> None:
        """Let others become the writer."""
        async with self._door:
            writer, self._writer = self._writer, None
            if writer is not None:
                await run_to_completion(writer.release())

    def add(self, *records: Record) -> None:
        """Have records go out with the next flush."""
        self._waiting += records
        self._added += len(records)

    async def append(self, *records: Record) -> None:
        """Add records, and return when they are durable."""
        self.add(*records)
        await self.flush()

    async def flush(self) -> None:
        """Write what waits; returns when it is durable.

        Cancelling waits for a commit that is under way: half a commit is not known to have
        happened or not, and what comes next depends on it.
        """
        mine = self._added
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._written >= mine:
                return
            batch, self._waiting = self._waiting, []
            self._written += len(batch)
            await run_to_completion(self._commit(batch))

    async def _commit(self, batch: list[Record]) -> None:
        try:
            if self._writer is None:
                raise SmokeboxError(f"the session {self.key} is not open for writing.")
            await self._writer.append(batch)
        except Exception as error:
            # Others may wait for records of this batch: they fail as this one does.
            self._failure = error
            raise
        now = time.time()
        for record in batch:
            self.conversation.apply(StoredRecord(self.head + 1, now, record))
