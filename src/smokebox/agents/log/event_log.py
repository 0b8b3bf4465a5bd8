"""The event log of one open session: its conversation, and the writer of its records."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from smokebox.agents.log.conversation import Conversation
from smokebox.errors import SmokeboxError
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from smokebox.agents.log.records import Record
    from smokebox.agents.log.store import SessionKey, SessionStore, SessionWriter


_PAGE = 1000


class EventLog:
    """Appends records to a session, and keeps its conversation up to date.

    `add` queues records; the next `flush` writes all queued records in one commit. After that
    they are durable and part of `conversation`. With `live`, replies are recorded while the
    model writes them, for readers that follow the log.
    """

    def __init__(self, store: SessionStore, key: SessionKey) -> None:
        self.key = key
        self.store = store
        self.conversation = Conversation()
        self.live = False
        self._writer: SessionWriter | None = None
        self._queued: list[Record] = []
        self._added = 0
        self._written = 0
        self._failure: Exception | None = None
        self._flush_lock = asyncio.Lock()
        self._writer_lock = asyncio.Lock()

    @property
    def acquired(self) -> bool:
        """True if this process is the writer of the session."""
        return self._writer is not None

    async def reload(self) -> None:
        """Read the whole log, and the logs that it was forked from."""
        self.conversation = await Conversation.load(self.store, self.key)

    async def refresh(self) -> None:
        """Read the records that were added since."""
        if self.conversation.head == 0:
            await self.reload()
            return
        while page := await self.store.read(self.key, after=self.conversation.head, limit=_PAGE):
            for stored in page:
                self.conversation.apply(stored)

    async def acquire(self, *, wait: float = 0.0) -> None:
        """Become the writer of the session, and read its new records.

        Raises:
            SessionBusy: Another process is the writer, and still was after `wait` seconds.
        """
        async with self._writer_lock:
            if self._writer is None:
                await run_to_completion(self._open(wait))

    async def _open(self, wait: float) -> None:
        writer = await self.store.open(self.key, wait=wait)
        self._queued.clear()
        self._written, self._failure = self._added, None
        try:
            if writer.head != self.conversation.head:
                await self.refresh()
        except BaseException:
            await writer.release()
            raise
        self._writer = writer

    async def release(self) -> None:
        """Allow another process to become the writer."""
        async with self._writer_lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                await run_to_completion(writer.release())

    def add(self, *records: Record) -> None:
        """Queue records for the next flush."""
        self._queued += records
        self._added += len(records)

    async def append(self, *records: Record) -> None:
        """Add records, and wait until they are durable."""
        self.add(*records)
        await self.flush()

    async def flush(self) -> None:
        """Write the queued records, and wait until they are durable.

        A cancelled flush still waits for its commit, because the next step depends on whether
        the commit took effect.
        """
        added = self._added
        async with self._flush_lock:
            if self._failure is not None:
                raise self._failure
            if self._written >= added:
                return
            batch, self._queued = self._queued, []
            self._written += len(batch)
            await run_to_completion(self._commit(batch))

    async def _commit(self, batch: list[Record]) -> None:
        try:
            if self._writer is None:
                raise SmokeboxError(f"the session {self.key} is not open for writing.")
            await self._writer.append(batch)
        except Exception as error:
            # Other flushes may wait for records of this batch: they fail with the same error.
            self._failure = error
            raise
        self.conversation.extend(batch, time.time())
