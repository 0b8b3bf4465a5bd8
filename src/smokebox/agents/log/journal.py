"""A session that is written to: its record, and what the record comes to, in step."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

from smokebox.agents.log.conversation import Conversation
from smokebox.agents.log.records import Stored

if TYPE_CHECKING:
    from smokebox.agents.log.records import Record
    from smokebox.agents.log.store import SessionKey, Store, Writer


class Journal:
    """The one writer of a session, with its conversation. Made by `Journal.open`."""

    def __init__(self, writer: Writer, conversation: Conversation) -> None:
        self._writer = writer
        self._turn = asyncio.Lock()
        self.conversation = conversation

    @classmethod
    async def open(cls, store: Store, key: SessionKey, *, wait: float = 0.0) -> Self:
        """Become the writer of a session, and read it. Raises `SessionBusy`."""
        writer = await store.open(key, wait=wait)
        try:
            return cls(writer, await Conversation.load(store, key))
        except BaseException:
            await writer.release()
            raise

    @property
    def key(self) -> SessionKey:
        """Which session."""
        return self._writer.key

    async def add(self, *records: Record) -> None:
        """Add records, all or none, in the order of the calls; they are durable afterwards.

        Who is cancelled while waiting cannot stop it: the conversation never lacks what the
        record has. Raises `Fenced`.
        """
        if records:
            await asyncio.shield(asyncio.ensure_future(self._add(records)))

    async def release(self) -> None:
        """Let others write. Safe to repeat."""
        async with self._turn:
            await self._writer.release()

    async def _add(self, records: tuple[Record, ...]) -> None:
        async with self._turn:
            head = await self._writer.append(records)
            now = time.time()
            for number, record in enumerate(records, head - len(records) + 1):
                self.conversation.apply(Stored(number, now, record))
