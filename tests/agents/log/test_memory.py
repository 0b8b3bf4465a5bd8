"""Tests of the store in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.agents.log.conformance import KEY, StoreSuite, write_session
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.records import MessageAdded
from smokebox.agents.messages import ImagePart, UserMessage
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class TestMemoryStore(StoreSuite):
    @pytest_asyncio.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        store = MemoryStore()
        yield store
        await store.aclose()


async def test_blobs_are_deleted_with_their_last_session() -> None:
    store = MemoryStore()
    name = await store.put_blob(b"picture")
    await write_session(
        store, KEY, MessageAdded("w", UserMessage((ImagePart("image/png", name, 7),)))
    )
    await store.delete(KEY)
    with pytest.raises(NotFound):
        await store.get_blob(name)
