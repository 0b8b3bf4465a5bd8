"""The suite that every store passes. Subclass `StoreSuite` and give it a fixture.

    class TestMyStore(StoreSuite):
        @pytest_asyncio.fixture
        async def store(self):
            store = MyStore(...)
            yield store
            await store.aclose()

Needs pytest and pytest-asyncio. Each case wants an empty store. A method `beside(store)`, which
gives the same sessions through a second object, makes the suite stricter.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from smokebox.agents.log.records import (
    MessageAdded,
    ReplyDelta,
    SessionCreated,
    WorkAccepted,
    WorkEnded,
)
from smokebox.agents.log.store import SessionKey
from smokebox.agents.messages import Image, Text, UserMessage
from smokebox.errors import Conflict, Fenced, NotFound, SessionBusy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents.log.records import Record, StoredRecord
    from smokebox.agents.log.store import SessionStore


KEY = SessionKey("agent", "one", "default")
# For a store that never answers.
PATIENCE = 15.0


def created(**fields: object) -> SessionCreated:
    """The first record of a session."""
    return SessionCreated("You are a test.", **fields)  # type: ignore[arg-type]


def said(text: str) -> MessageAdded:
    """A record that can be told from others."""
    return MessageAdded("work", UserMessage((Text(text),)))


def near(name: str) -> SessionKey:
    """Another session of the same agent and id."""
    return SessionKey(KEY.agent, KEY.id, name)


async def fill(store: SessionStore, key: SessionKey, *records: Record) -> None:
    """Write a session, and let go of it."""
    writer = await store.open(key)
    await writer.append(records or [created()])
    await writer.release()


async def take(
    store: SessionStore, key: SessionKey, count: int, *, after: int = 0
) -> list[StoredRecord]:
    """The first so many that `follow` gives."""
    found: list[StoredRecord] = []
    async with asyncio.timeout(PATIENCE), aclosing(store.follow(key, after=after)) as records:
        async for stored in records:
            found.append(stored)
            if len(found) == count:
                break
    return found


@pytest.mark.asyncio
class StoreSuite:
    """Every case. The subclass gives an async fixture `store`, and perhaps `beside`."""

    def beside(self, store: Any) -> SessionStore:
        """The same sessions through another object, as another process would have them."""
        same: SessionStore = store
        return same

    @pytest_asyncio.fixture
    async def other(self, store: SessionStore) -> AsyncIterator[SessionStore]:
        """What `beside` makes."""
        other = self.beside(store)
        yield other
        if other is not store:
            await other.aclose()

    async def test_records_come_back_as_they_were_added(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        writer = await store.open(KEY)
        image = UserMessage((Text("wörds \0 \u2028"), Image("image/png", "blob", 3)), signal="x")
        records: list[Record] = [
            created(tools=({"name": "t", "parameters": {"a": [1, None, 2.5]}},)),
            MessageAdded("w", image),
            WorkEnded("w", "completed", result={"deep": [{"er": None}]}),
        ]
        assert await writer.append(records) == 3
        for view in (store, other):
            found = await view.read(KEY)
            assert [one.record for one in found] == records
            assert [one.offset for one in found] == [1, 2, 3]
        assert found[0].at > 1_600_000_000

    async def test_offsets_go_on_with_the_next_writer(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        await fill(store, KEY, created(), said("a"))
        writer = await other.open(KEY)
        assert (writer.key, writer.head) == (KEY, 2)
        assert await writer.append([said("b"), said("c")]) == 4
        assert writer.head == 4
        assert [one.offset for one in await store.read(KEY, after=1, limit=2)] == [2, 3]

    async def test_a_session_that_is_not_there_has_no_records(self, store: SessionStore) -> None:
        assert await store.read(KEY) == []
        assert await store.sessions() == []

    async def test_a_session_has_one_writer(self, store: SessionStore, other: SessionStore) -> None:
        writer = await store.open(KEY)
        for view in (store, other):
            with pytest.raises(SessionBusy, match="agent/one/default") as caught:
                await view.open(KEY)
            assert caught.value.session == str(KEY)
        await (await other.open(near("elsewhere"))).release()
        await writer.release()
        await writer.release()
        await (await other.open(KEY)).release()

    async def test_open_waits_for_the_writer_to_let_go(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        writer = await store.open(KEY)
        with pytest.raises(SessionBusy):
            await other.open(KEY, wait=0.05)
        waiting = asyncio.create_task(other.open(KEY, wait=PATIENCE))
        await asyncio.sleep(0)
        await writer.append([created()])
        await writer.release()
        assert (await waiting).head == 1

    async def test_of_many_that_open_one_gets_it(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        opened = await asyncio.gather(
            *(view.open(KEY) for view in (store, other) * 4), return_exceptions=True
        )
        assert sorted(isinstance(one, SessionBusy) for one in opened) == [False] + [True] * 7

    async def test_a_writer_that_let_go_writes_no_more(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        await writer.append([created()])
        await writer.release()
        with pytest.raises(Fenced):
            await writer.append([said("late")])
        assert len(await store.read(KEY)) == 1

    async def test_the_writer_of_a_deleted_session_is_fenced(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        writer = await store.open(KEY)
        await writer.append([created()])
        assert await other.delete(KEY)
        with pytest.raises(Fenced, match="agent/one/default"):
            await writer.append([said("late")])
        await writer.release()
        await fill(other, KEY, created(), said("anew"))
        with pytest.raises(Fenced):
            await writer.append([said("later")])
        assert len(await store.read(KEY)) == 2

    async def test_a_session_without_records_leaves_nothing(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        assert await store.sessions() == []
        await writer.release()
        assert not await store.delete(KEY)

    async def test_appends_at_once_take_effect_in_order(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        heads = await asyncio.gather(
            *(writer.append([said(f"{number}"), said("-")]) for number in range(50))
        )
        assert list(heads) == [2 * number + 2 for number in range(50)]
        found = [one.record for one in await store.read(KEY)][::2]
        assert found == [said(f"{number}") for number in range(50)]

    async def test_a_cancelled_append_leaves_the_writer_usable(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        task = asyncio.create_task(writer.append([said("perhaps"), said("perhaps")]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        head = await writer.append([said("certainly")])
        found = await store.read(KEY)
        assert [one.offset for one in found] == list(range(1, head + 1))
        assert [one.record for one in found][-1] == said("certainly")
        assert head in (1, 3)

    async def test_large_records_are_kept_whole(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        text = "x" * 3_000_000
        await writer.append([said(text)])
        [found] = await store.read(KEY)
        assert found.record == said(text)

    async def test_follow_gives_what_is_there_and_what_is_added(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        writer = await store.open(KEY)
        await writer.append([created(), said("a")])
        following = [asyncio.create_task(take(view, KEY, 42)) for view in (store, other)]
        for number in range(40):
            await writer.append([ReplyDelta("r", f"{number}")])
        for task in following:
            assert [one.offset for one in await task] == list(range(1, 43))

    async def test_follow_begins_behind_an_offset(self, store: SessionStore) -> None:
        await fill(store, KEY, created(), said("a"), said("b"))
        assert [one.offset for one in await take(store, KEY, 2, after=1)] == [2, 3]

    async def test_follow_waits_for_a_session_that_is_not_there(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        following = asyncio.create_task(take(other, KEY, 2))
        await asyncio.sleep(0)
        await (await store.open(KEY)).release()
        await fill(store, KEY, created(), said("a"))
        assert [one.record for one in await following] == [created(), said("a")]

    async def test_follow_ends_with_its_session(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        await fill(store, KEY, created())
        found: list[int] = []
        async with asyncio.timeout(PATIENCE):
            async for stored in other.follow(KEY):
                found.append(stored.offset)
                await store.delete(KEY)
        assert found == [1]

    async def test_sessions_are_listed_by_their_last_change(self, store: SessionStore) -> None:
        for name in ("a", "b", "c"):
            await fill(store, near(name), created(parent="a" if name == "b" else None))
        await fill(store, near("a"), WorkAccepted("w", "prompt"), WorkAccepted("v", "prompt"))
        await fill(store, near("a"), WorkEnded("w", "completed"))
        found = await store.sessions()
        assert [one.key.session for one in found] == ["a", "c", "b"]
        assert [one.head for one in found] == [4, 1, 1]
        assert [one.unfinished for one in found] == [1, 0, 0]
        assert [one.parent for one in found] == [None, None, "a"]
        assert found[0].created_at <= found[0].updated_at
        assert [one.key.session for one in await store.sessions(limit=1)] == ["a"]

    async def test_sessions_are_found_by_agent_and_id(self, store: SessionStore) -> None:
        for key in (
            SessionKey("x", "1", "s"),
            SessionKey("x", "2", "s"),
            SessionKey("y", "1", "s"),
        ):
            await fill(store, key)
        assert {one.key.id for one in await store.sessions(agent="x")} == {"1", "2"}
        assert {one.key.agent for one in await store.sessions(id="1")} == {"x", "y"}
        [one] = await store.sessions(agent="x", id="2")
        assert one.key == SessionKey("x", "2", "s")
        assert await store.sessions(agent="'; DROP TABLE sessions; --") == []

    async def test_sessions_of_odd_names_are_not_mistaken(self, store: SessionStore) -> None:
        for key in (SessionKey("a/b", "c", "d"), SessionKey("a", "b/c", "d")):
            await fill(store, key, created(), said(key.agent))
        [_, found] = await store.read(SessionKey("a", "b/c", "d"))
        assert found.record == said("a")

    async def test_delete_takes_children_along(self, store: SessionStore) -> None:
        await fill(store, KEY)
        await fill(store, near("child"), created(parent="default"))
        await fill(store, near("grandchild"), created(parent="child"))
        await fill(store, near("sibling"))
        await fill(store, SessionKey("agent", "two", "child"), created(parent="default"))
        assert await store.delete(KEY)
        assert {one.key for one in await store.sessions()} == {
            near("sibling"),
            SessionKey("agent", "two", "child"),
        }
        assert await store.read(near("grandchild")) == []
        assert not await store.delete(KEY)

    async def test_what_a_fork_begins_with_is_not_deleted(self, store: SessionStore) -> None:
        await fill(store, KEY)
        await fill(store, near("fork"), created(forked_from="default", forked_at=1))
        with pytest.raises(Conflict, match="agent/one/fork"):
            await store.delete(KEY)
        assert await store.delete(near("fork"))
        assert await store.delete(KEY)

    async def test_blobs_have_the_name_of_their_bytes(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        data = bytes(range(256)) * 100
        name = await store.put_blob(data)
        assert name == await other.put_blob(data)
        assert await other.get_blob(name) == data
        assert await store.get_blob(await store.put_blob(b"")) == b""
        with pytest.raises(NotFound) as caught:
            await store.get_blob("0" * 64)
        assert caught.value.name == "0" * 64

    async def test_blobs_of_another_session_stay(self, store: SessionStore) -> None:
        name = await store.put_blob(b"picture")
        picture = MessageAdded("w", UserMessage((Image("image/png", name, 7),)))
        await fill(store, KEY, created(), picture)
        await fill(store, near("other"), created(), picture)
        await store.delete(KEY)
        assert await store.get_blob(name) == b"picture"

    async def test_a_closed_store_says_so(self, store: SessionStore) -> None:
        await fill(store, KEY)
        await store.aclose()
        await store.aclose()
        with pytest.raises(Conflict, match="closed"):
            await store.read(KEY)
        with pytest.raises(Conflict, match="closed"):
            await store.open(KEY)
