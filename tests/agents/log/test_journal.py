"""A session that is written to."""

from __future__ import annotations

import asyncio

import pytest

from agents.log.scenes import user
from smokebox.agents.log.contract import KEY, created, fill, said
from smokebox.agents.log.conversation import Conversation
from smokebox.agents.log.journal import Journal
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.errors import SessionBusy


async def test_the_conversation_keeps_step_with_the_record(tmp_path: object) -> None:
    store = SqliteStore(f"{tmp_path}/agents.db")
    await fill(store, KEY, created())
    journal = await Journal.open(store, KEY)
    await journal.add()
    tasks = [asyncio.create_task(journal.add(said(f"{number}"))) for number in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    await asyncio.wait(tasks)
    await journal.add(said("end"))
    assert journal.conversation.messages[-1] == user("end")
    assert journal.conversation.messages == (await Conversation.load(store, KEY)).messages
    await journal.release()
    await store.aclose()


async def test_a_session_is_free_again_once_released() -> None:
    store = MemoryStore()
    journal = await Journal.open(store, KEY)
    with pytest.raises(SessionBusy):
        await Journal.open(store, KEY)
    await journal.release()
    assert (await Journal.open(store, KEY)).key == KEY
