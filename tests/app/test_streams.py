"""Event streams: from any offset, for any number of watchers, without gaps or duplicates."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from app.site import project, serve, serve_asgi
from smokebox.agents.log.records import ReplyDelta
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.log.store import SessionKey
from smokebox.app import create_app, streams
from smokebox.app.inbox import AppInbox, WorkTarget
from smokebox.app.streams import ConversationEvents, EventStreams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    import pytest

    from app.site import Event, Site

KEY = SessionKey("echo", "one", "default")


async def first(site: Site, count: int, *, last: int = 0, id: str = "one") -> list[Event]:
    """Return the next events of a conversation."""
    source = site.events(f"/agents/echo/{id}", last=last)
    async with aclosing(cast("AsyncGenerator[Event, None]", source)) as events:
        return [await anext(events) for _ in range(count)]


async def test_watcher_gets_past_and_live_events(site: Site) -> None:
    await site.send("echo/one?wait=result", "before")
    head = (await site.get("/agents/echo/one")).body["offset"]
    watching = asyncio.create_task(first(site, 2 * head - 1))
    await site.send("echo/one?wait=result", "after")
    found = await watching
    assert [one.id for one in found] == list(range(1, 2 * head))
    assert [one.data["offset"] for one in found] == [one.id for one in found]


async def test_watcher_may_connect_before_the_conversation_exists(site: Site) -> None:
    watching = asyncio.create_task(first(site, 3))
    await site.send("echo/one", "hello")
    assert [one.id for one in await watching] == [1, 2, 3]


async def test_reconnect_resumes_after_the_last_event(site: Site) -> None:
    await site.send("echo/one?wait=result", "hello")
    head = (await site.get("/agents/echo/one")).body["offset"]
    found, last = [], 0
    while last < head:
        [event] = await first(site, 1, last=last)
        found.append(event.id)
        last = event.id or 0
    assert found == list(range(1, head + 1))


async def test_reply_is_streamed_while_it_is_generated(site: Site, folder: Path) -> None:
    """Deltas are recorded before the reply ends."""
    events = site.events("/agents/echo/one", method="POST", body={"message": "x" * 2000})
    kinds = [one.kind async for one in events]
    assert kinds.index("reply_delta") < kinds.index("reply_ended")


async def test_long_poll_waits_for_events(site: Site) -> None:
    polling = asyncio.create_task(site.get("/agents/echo/one?wait=30"))
    await site.send("echo/one", "hello")
    found = (await polling).body
    assert found["events"] and found["offset"] == found["events"][-1]["offset"]
    nothing = (await site.get("/agents/echo/two?wait=0.05")).body
    assert nothing == {"events": [], "offset": 0}


async def test_events_of_a_submission_resume_after_an_offset(site: Site) -> None:
    await site.send("echo/one?wait=result", "before")
    id = (await site.send("echo/one?wait=result", "hello")).body["submission_id"]
    found = [one async for one in site.events(f"/submissions/{id}")]
    ids = [one.id for one in found if one.id is not None]
    assert found[1].kind == "work_accepted" and len(ids) > 3
    rest = [one.id async for one in site.events(f"/submissions/{id}", last=ids[1])]
    assert [id for id in rest if id is not None] == ids[2:]


async def test_stream_ends_when_its_conversation_is_deleted(site: Site) -> None:
    await site.send("echo/one?wait=result", "hello")
    head = (await site.get("/agents/echo/one")).body["offset"]
    events = site.events("/agents/echo/one")
    for _ in range(head):
        await anext(events)
    await site.delete("/agents/echo/one")
    assert [one async for one in events] == []


async def test_500_readers_of_one_stream_get_the_same_events(site: Site) -> None:
    readers = [asyncio.create_task(first(site, 6)) for _ in range(500)]
    await site.send("echo/one?wait=result", "hello")
    for found in await asyncio.gather(*readers):
        assert [one.id for one in found] == [1, 2, 3, 4, 5, 6]


async def test_offset_in_the_future_does_not_block_others(site: Site) -> None:
    """A watcher of a future offset waits; others see all past and later events."""
    await site.send("echo/one?wait=result", "before")
    head = (await site.get("/agents/echo/one")).body["offset"]
    waiting = asyncio.create_task(first(site, 1, last=10**15))
    polling = asyncio.create_task(site.get(f"/agents/echo/one?offset={10**15}&wait=0.5"))
    watching = asyncio.create_task(first(site, 2 * head - 1))
    await site.send("echo/one?wait=result", "after")
    assert [one.id for one in await watching] == list(range(1, 2 * head))
    assert (await polling).body == {"events": [], "offset": 10**15}
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_watcher_cancelled_during_an_event_is_released(tmp_path: Path) -> None:
    """A cancellation that arrives together with a wake must not be lost."""
    store = SqliteStore(str(tmp_path / "c.db"))
    inbox = AppInbox(str(tmp_path / "inbox.db"))
    sent = await inbox.accept(WorkTarget(kind="agent", name="echo", id="one"), 1)
    for wakes, key, follow in (
        (store._wakeups, KEY, lambda: anext(store.follow(KEY))),
        (inbox._wakes, sent.id, lambda: anext(inbox.follow(sent.id))),
        (inbox._wakes, sent.id, lambda: inbox.wait(sent.id)),
    ):
        following = asyncio.ensure_future(follow())
        while not (listening := list(wakes._events.get(key, ()))):
            await asyncio.sleep(0)
        while not listening[0]._waiters:
            await asyncio.sleep(0)
        listening[0].set()
        # The awaited future is done, but the watcher has not resumed yet.
        await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait([following])
        assert following.cancelled()
    await inbox.aclose()
    await store.aclose()


async def test_log_lines_of_a_run_reach_all_watchers(tmp_path: Path) -> None:
    text = """
    import asyncio

    async def run(ctx):
        for number in range(300):
            ctx.log.info("line", number=number)
            await asyncio.sleep(0)
    """

    async def read(path: str) -> list[int]:
        return [
            one.data["fields"]["number"] async for one in site.events(path) if one.kind == "log"
        ]

    async with serve(project(tmp_path / "p", workflows__talk=text)) as site:
        path = f"/runs/{(await site.post('/workflows/talk')).body['id']}"
        for found in await asyncio.gather(*(read(path) for _ in range(50))):
            assert found == list(range(300))


async def write_records(folder: Path, count: int, size: int = 100) -> None:
    """Create a conversation with a number of records."""
    store = SqliteStore(str(folder / ".smokebox/conversations.db"))
    writer = await store.open(KEY)
    for numbers in _batches(count):
        await writer.append([ReplyDelta("r", f"{n} {'x' * size}") for n in numbers])
    await writer.release()
    await store.aclose()


def _batches(count: int) -> list[range]:
    return [range(at, min(at + 1000, count)) for at in range(0, count, 1000)]


async def test_reader_with_an_old_offset_gets_everything_in_order(folder: Path) -> None:
    await write_records(folder, 20_000)
    async with serve(folder) as site:
        found = await first(site, 20_000 - 17, last=17)
        assert [one.id for one in found] == list(range(18, 20_001))


async def test_slow_reader_neither_blocks_others_nor_misses_events(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is far behind the buffer reads from the store."""
    monkeypatch.setattr(streams, "_RECENT_EVENTS", 50)
    count, size = 4000, 4000
    async with serve(folder) as site:
        slow = cast("AsyncGenerator[Event, None]", site.events("/agents/echo/one"))
        async with aclosing(slow):
            quick = asyncio.create_task(first(site, count))
            first_event = asyncio.create_task(anext(slow))
            await write_records(folder, count, size)
            assert [one.id for one in await quick] == list(range(1, count + 1))
            rest = [await first_event] + [await anext(slow) for _ in range(count - 1)]
            assert [one.id for one in rest] == list(range(1, count + 1))


async def test_buffer_of_recent_events_is_bounded(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "c.db"))
    watched = EventStreams()
    writer = await store.open(KEY)
    async with watched.watch(ConversationEvents(store, KEY)) as stream:
        while stream._base is None:
            await asyncio.sleep(0)
        for numbers in _batches(3000):
            await writer.append([ReplyDelta("r", f"{n} {'x' * 500}") for n in numbers])
        while (stream._base or 0) < 1000:
            await asyncio.sleep(0.01)
        assert stream._size <= 1 << 20 and len(stream._recent) <= 2000
    await writer.release()
    await store.aclose()


async def test_disconnected_readers_leave_nothing_behind(folder: Path) -> None:
    asgi = create_app(folder)
    async with serve_asgi(asgi) as site:
        await site.send("echo/one?wait=result", "hello")
        for _ in range(20):
            await first(site, 2)
        while asgi.state.smokebox.streams._open:
            await asyncio.sleep(0.01)


async def test_readers_in_another_process_see_events(folder: Path) -> None:
    """Two apps on one folder, as two processes have it: a reader of one sees the work of both."""
    async with serve(folder) as one, serve(folder) as two:
        watching = [asyncio.create_task(first(site, 4)) for site in (one, two)]
        await one.send("echo/one", "hello")
        for found in await asyncio.gather(*watching):
            assert [event.id for event in found] == [1, 2, 3, 4]
