"""Conformance suite of session stores. Subclass `StoreSuite` and define the fixture `store`.

    class TestMyStore(StoreSuite):
        @pytest_asyncio.fixture
        async def store(self):
            store = MyStore(...)
            yield store
            await store.aclose()

Needs pytest and pytest-asyncio. Each case needs an empty store. A method `reopen(store)` that
returns a second store over the same sessions makes the suite stricter.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from smokebox.agents.log.records import (
    CheckpointTaken,
    MessageAdded,
    ReplyDelta,
    SessionCreated,
    WorkAccepted,
    WorkEnded,
)
from smokebox.agents.log.store import SessionKey
from smokebox.agents.messages import ImagePart, Text, UserMessage
from smokebox.errors import Conflict, Fenced, NotFound, SessionBusy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.agents.log.records import Record, StoredRecord
    from smokebox.agents.log.store import SessionStore


KEY = SessionKey("agent", "one", "default")
# For a store that hangs.
TIMEOUT = 15.0


def created(**fields: object) -> SessionCreated:
    """Return the first record of a session."""
    return SessionCreated("You are a test.", **fields)  # type: ignore[arg-type]


def note(text: str) -> MessageAdded:
    """Return a record with this text."""
    return MessageAdded("work", UserMessage((Text(text),)))


def sibling(name: str) -> SessionKey:
    """Return the key of another session of the same agent and id."""
    return SessionKey(KEY.agent, KEY.id, name)


async def write_session(store: SessionStore, key: SessionKey, *records: Record) -> None:
    """Open a session, append records, and release it."""
    writer = await store.open(key)
    await writer.append(records or [created()])
    await writer.release()


async def follow(
    store: SessionStore, key: SessionKey, count: int, *, after: int = 0
) -> list[StoredRecord]:
    """Return the first `count` records that `SessionStore.follow` yields."""
    found: list[StoredRecord] = []
    async with asyncio.timeout(TIMEOUT), aclosing(store.follow(key, after=after)) as records:
        async for stored in records:
            found.append(stored)
            if len(found) == count:
                break
    return found


@pytest.mark.asyncio
class StoreSuite:
    """Cases for a store. The subclass defines an async fixture `store`, and maybe `reopen`."""

    def reopen(self, store: Any) -> SessionStore:
        """Return another store over the same sessions, as another process would open it."""
        same: SessionStore = store
        return same

    @pytest_asyncio.fixture
    async def other(self, store: SessionStore) -> AsyncIterator[SessionStore]:
        """The store that `reopen` returns."""
        other = self.reopen(store)
        yield other
        if other is not store:
            await other.aclose()

    async def test_read_returns_appended_records(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        writer = await store.open(KEY)
        image = UserMessage(
            (Text("wörds \0 \u2028"), ImagePart("image/png", "blob", 3)), signal="x"
        )
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

    async def test_next_writer_continues_offsets(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        await write_session(store, KEY, created(), note("a"))
        writer = await other.open(KEY)
        assert writer.head == 2
        assert await writer.append([note("b"), note("c")]) == 4
        assert writer.head == 4
        assert [one.offset for one in await store.read(KEY, after=1, limit=2)] == [2, 3]

    async def test_missing_session_has_no_records(self, store: SessionStore) -> None:
        assert await store.read(KEY) == []
        assert await store.sessions() == []

    async def test_second_writer_is_refused(self, store: SessionStore, other: SessionStore) -> None:
        writer = await store.open(KEY)
        for view in (store, other):
            with pytest.raises(SessionBusy, match="agent/one/default") as caught:
                await view.open(KEY)
            assert caught.value.session == str(KEY)
        await (await other.open(sibling("elsewhere"))).release()
        await writer.release()
        await writer.release()
        await (await other.open(KEY)).release()

    async def test_open_waits_for_release(self, store: SessionStore, other: SessionStore) -> None:
        writer = await store.open(KEY)
        with pytest.raises(SessionBusy):
            await other.open(KEY, wait=0.05)
        waiting = asyncio.create_task(other.open(KEY, wait=TIMEOUT))
        await asyncio.sleep(0)
        await writer.append([created()])
        await writer.release()
        assert (await waiting).head == 1

    async def test_concurrent_opens_have_one_winner(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        opened = await asyncio.gather(
            *(view.open(KEY) for view in (store, other) * 4), return_exceptions=True
        )
        assert sorted(isinstance(one, SessionBusy) for one in opened) == [False] + [True] * 7

    async def test_released_writer_is_fenced(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        await writer.append([created()])
        await writer.release()
        with pytest.raises(Fenced):
            await writer.append([note("late")])
        assert len(await store.read(KEY)) == 1

    async def test_writer_of_deleted_session_is_fenced(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        writer = await store.open(KEY)
        await writer.append([created()])
        assert await other.delete(KEY)
        with pytest.raises(Fenced, match="agent/one/default"):
            await writer.append([note("late")])
        await writer.release()
        await write_session(other, KEY, created(), note("recreated"))
        with pytest.raises(Fenced):
            await writer.append([note("later")])
        assert len(await store.read(KEY)) == 2

    async def test_session_without_records_is_not_stored(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        assert await store.sessions() == []
        await writer.release()
        assert not await store.delete(KEY)

    async def test_concurrent_appends_keep_their_order(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        heads = await asyncio.gather(
            *(writer.append([note(f"{number}"), note("-")]) for number in range(50))
        )
        assert list(heads) == [2 * number + 2 for number in range(50)]
        found = [one.record for one in await store.read(KEY)][::2]
        assert found == [note(f"{number}") for number in range(50)]

    async def test_writer_is_usable_after_cancelled_append(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        task = asyncio.create_task(writer.append([note("perhaps"), note("perhaps")]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        head = await writer.append([note("certainly")])
        found = await store.read(KEY)
        assert [one.offset for one in found] == list(range(1, head + 1))
        assert [one.record for one in found][-1] == note("certainly")
        assert head in (1, 3)

    async def test_large_record_is_stored_whole(self, store: SessionStore) -> None:
        writer = await store.open(KEY)
        text = "x" * 3_000_000
        await writer.append([note(text)])
        [found] = await store.read(KEY)
        assert found.record == note(text)

    async def test_follow_yields_stored_and_new_records(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        writer = await store.open(KEY)
        await writer.append([created(), note("a")])
        following = [asyncio.create_task(follow(view, KEY, 42)) for view in (store, other)]
        for number in range(40):
            await writer.append([ReplyDelta("r", f"{number}")])
        for task in following:
            assert [one.offset for one in await task] == list(range(1, 43))

    async def test_follow_starts_after_offset(self, store: SessionStore) -> None:
        await write_session(store, KEY, created(), note("a"), note("b"))
        assert [one.offset for one in await follow(store, KEY, 2, after=1)] == [2, 3]

    async def test_follow_waits_for_missing_session(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        following = asyncio.create_task(follow(other, KEY, 2))
        await asyncio.sleep(0)
        await (await store.open(KEY)).release()
        await write_session(store, KEY, created(), note("a"))
        assert [one.record for one in await following] == [created(), note("a")]

    async def test_follow_ends_when_session_is_deleted(
        self, store: SessionStore, other: SessionStore
    ) -> None:
        await write_session(store, KEY, created())
        found: list[int] = []
        async with asyncio.timeout(TIMEOUT):
            async for stored in other.follow(KEY):
                found.append(stored.offset)
                await store.delete(KEY)
        assert found == [1]

    async def test_sessions_are_sorted_by_last_change(self, store: SessionStore) -> None:
        for name in ("a", "b", "c"):
            await write_session(store, sibling(name), created(parent="a" if name == "b" else None))
        await write_session(
            store, sibling("a"), WorkAccepted("w", "prompt"), WorkAccepted("v", "prompt")
        )
        await write_session(store, sibling("a"), WorkEnded("w", "completed"))
        found = await store.sessions()
        assert [one.key.session for one in found] == ["a", "c", "b"]
        assert [one.head for one in found] == [4, 1, 1]
        assert [one.unfinished for one in found] == [1, 0, 0]
        assert [one.parent for one in found] == [None, None, "a"]
        assert found[0].created_at <= found[0].updated_at
        assert [one.key.session for one in await store.sessions(limit=1)] == ["a"]

    async def test_sessions_filters_by_agent_and_id(self, store: SessionStore) -> None:
        for key in (
            SessionKey("x", "1", "s"),
            SessionKey("x", "2", "s"),
            SessionKey("y", "1", "s"),
        ):
            await write_session(store, key)
        assert {one.key.id for one in await store.sessions(agent="x")} == {"1", "2"}
        assert {one.key.agent for one in await store.sessions(id="1")} == {"x", "y"}
        assert {one.key.id for one in await store.sessions(prefix="1")} == {"1"}
        assert await store.sessions(agent="x", id="1", prefix="2") == []
        assert await store.sessions(prefix="%") == []
        [one] = await store.sessions(agent="x", id="2")
        assert one.key == SessionKey("x", "2", "s")
        assert await store.sessions(agent="'; DROP TABLE sessions; --") == []

    async def test_slashes_in_names_do_not_mix_up_sessions(self, store: SessionStore) -> None:
        for key in (SessionKey("a/b", "c", "d"), SessionKey("a", "b/c", "d")):
            await write_session(store, key, created(), note(key.agent))
        [_, found] = await store.read(SessionKey("a", "b/c", "d"))
        assert found.record == note("a")

    async def test_delete_removes_child_sessions(self, store: SessionStore) -> None:
        await write_session(store, KEY)
        await write_session(store, sibling("child"), created(parent="default"))
        await write_session(store, sibling("grandchild"), created(parent="child"))
        await write_session(store, sibling("sibling"))
        await write_session(store, SessionKey("agent", "two", "child"), created(parent="default"))
        assert await store.delete(KEY)
        assert {one.key for one in await store.sessions()} == {
            sibling("sibling"),
            SessionKey("agent", "two", "child"),
        }
        assert await store.read(sibling("grandchild")) == []
        assert not await store.delete(KEY)

    async def test_forked_session_cannot_be_deleted(self, store: SessionStore) -> None:
        await write_session(store, KEY)
        await write_session(store, sibling("fork"), created(forked_from="default", forked_at=1))
        with pytest.raises(Conflict, match="agent/one/fork"):
            await store.delete(KEY)
        assert await store.delete(sibling("fork"))
        assert await store.delete(KEY)

    async def test_equal_blobs_have_the_same_name(
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

    async def test_delete_keeps_blobs_of_other_sessions(self, store: SessionStore) -> None:
        name = await store.put_blob(b"picture")
        picture = MessageAdded("w", UserMessage((ImagePart("image/png", name, 7),)))
        await write_session(store, KEY, created(), picture)
        await write_session(store, sibling("other"), created(), picture)
        await store.delete(KEY)
        assert await store.get_blob(name) == b"picture"

    async def test_a_dropped_blob_stays_for_other_sessions(self, store: SessionStore) -> None:
        name, later = await store.put_blob(b"files"), await store.put_blob(b"later files")
        taken = CheckpointTaken("w", name, 1, 1, in_blob=True)
        await write_session(store, KEY, created(), taken)
        await write_session(store, sibling("other"), created(), taken)
        writer = await store.open(KEY)
        await writer.append([CheckpointTaken("w", later, 2, 1, in_blob=True, dropped=(name,))])
        await writer.release()
        assert await store.get_blob(name) == b"files"
        assert await store.get_blob(later) == b"later files"

    async def test_closed_store_raises_conflict(self, store: SessionStore) -> None:
        await write_session(store, KEY)
        await store.aclose()
        await store.aclose()
        with pytest.raises(Conflict, match="closed"):
            await store.read(KEY)
        with pytest.raises(Conflict, match="closed"):
            await store.open(KEY)
