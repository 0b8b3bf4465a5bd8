"""Watches over HTTP: live when they answer, told in order, taken up again, freed when left."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest_asyncio

from server.boxes import DEADLINE, Box, eventually, make_box, open_files
from smokebox.foundation import sse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from smokebox.server.server import RunningServer


class Watcher:
    """The events of a watch, one after the other."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self._reader = sse.EventReader()
        self._events: list[sse.Event] = []

    async def event(self) -> sse.Event | None:
        """The next event; None at the end."""
        async with asyncio.timeout(DEADLINE):
            while not self._events:
                data = await self._answer.content.readany()
                if not data:
                    return None
                self._events += self._reader.feed(data)
            return self._events.pop(0)

    async def change(self) -> tuple[str, str]:
        """The kind and the name of the next change."""
        event = await self.event()
        assert event is not None
        assert event.name == "change"
        change = msgspec.json.decode(event.data)
        assert change["cursor"] == event.id
        return change["kind"], change["path"].removeprefix("/workspace/")


@pytest_asyncio.fixture
async def box(server: RunningServer, http: aiohttp.ClientSession) -> Box:
    return await make_box(server, http)


@contextlib.asynccontextmanager
async def watching(
    box: Box, path: str = ".", *, last: str | None = None, **query: Any
) -> AsyncIterator[tuple[Watcher, str]]:
    """A watch that is live, and its first cursor."""
    headers = {"last-event-id": last} if last is not None else {}
    url, params = box.url("watch"), {"path": path, **query}
    async with box.http.get(url, params=params, headers=headers) as answer:
        assert (answer.status, answer.headers["content-type"]) == (200, sse.MEDIA)
        watcher = Watcher(answer)
        first = await watcher.event()
        assert first is not None
        assert (first.name, msgspec.json.decode(first.data)) == ("watching", {"cursor": first.id})
        yield watcher, first.id or ""


async def test_changes_are_told_as_they_happen(box: Box) -> None:
    async with watching(box) as (watcher, _):
        await box.write("f", b"x")
        assert await watcher.change() == ("create", "f")
        await box.engine.files.mkdir("d")
        assert await watcher.change() == ("create", "d")
        await box.engine.exec("echo > 'd/ü #'")
        assert await watcher.change() == ("create", "d/ü #")


async def test_a_watch_is_live_when_it_answers(box: Box) -> None:
    for number in range(10):
        url = box.url("watch")
        async with box.http.get(url, params={"path": "."}) as answer:
            # The header is here: from now on nothing may be missed.
            await box.engine.files.write_file(f"f{number}", b"")
            watcher = Watcher(answer)
            await watcher.event()
            assert await watcher.change() == ("create", f"f{number}")


async def test_a_watch_is_taken_up_where_it_was_left(box: Box) -> None:
    async with watching(box) as (watcher, start):
        await box.write("a", b"")
        event = await watcher.event()
        assert event is not None
        cursor = event.id
    await box.write("b", b"")
    async with watching(box, last=cursor) as (watcher, _):
        assert await watcher.change() == ("create", "b")
    async with watching(box, cursor=cursor) as (watcher, _):
        assert await watcher.change() == ("create", "b")
    # A browser that reconnects repeats its address, and the header is newer.
    async with watching(box, last=cursor, cursor=start) as (watcher, _):
        assert await watcher.change() == ("create", "b")


async def test_a_cursor_that_nobody_knows_asks_for_a_resync(box: Box) -> None:
    async with watching(box, last="0123456789abcdef:7") as (watcher, _):
        assert (await watcher.change())[0] == "resync"


async def test_patterns_say_what_is_told(box: Box) -> None:
    await box.engine.files.mkdir("node_modules")
    async with watching(box, include=["*.py", "*.js"]) as (watcher, _):
        for name in ("a.txt", "node_modules/b.py", "c.js"):
            await box.write(name, b"")
        assert await watcher.change() == ("create", "c.js")
    async with watching(box, exclude="") as (watcher, _):
        await box.write("node_modules/d.py", b"")
        assert await watcher.change() == ("create", "node_modules/d.py")


async def test_the_end_of_what_is_watched_ends_the_watch(box: Box) -> None:
    await box.engine.files.mkdir("d")
    async with watching(box, "d") as (watcher, _):
        await box.engine.files.rm("d", recursive=True)
        while (event := await watcher.event()) is not None:
            assert event.name == "change"
    await eventually(lambda: not box.engine.files.busy)


async def test_a_sandbox_that_sleeps_ends_its_watches_with_an_error(box: Box) -> None:
    async with watching(box) as (watcher, _):
        await box.engine.sleep()
        event = await watcher.event()
        assert event is not None
        assert (event.name, msgspec.json.decode(event.data)["code"]) == ("error", "sandbox_gone")
        assert await watcher.event() is None


async def test_a_client_that_leaves_frees_its_watch(box: Box) -> None:
    async with watching(box) as (_, cursor):
        assert box.engine.files.busy
    await eventually(lambda: not box.engine.files.busy)
    before = open_files()
    # The journal of the first lives on for a while, and all of these are that one.
    for _ in range(20):
        async with box.connection(f"GET watch?path=.&cursor={cursor}") as (reader, _):
            await asyncio.wait_for(reader.readuntil(b"watching"), DEADLINE)
        async with box.connection(f"GET watch?path=.&cursor={cursor}"):
            pass
    await box.settled(before)


async def test_a_client_that_leaves_before_the_watch_is_live_frees_it(box: Box) -> None:
    await box.engine.exec("mkdir -p d/{0..9}{0..9}{0..9}{0..9}")
    before = open_files()
    async with box.connection("GET watch?path=d"):
        await eventually(lambda: box.engine.files.busy)
    await box.settled(before)


async def test_more_watches_than_there_may_be_are_refused(box: Box) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(8):
            await box.engine.files.mkdir(f"d{number}")
            await stack.enter_async_context(watching(box, f"d{number}"))
        refused = await box.ask("GET", "watch", params={"path": "."})
        assert (refused.status, refused.code) == (429, "limit_reached")


async def test_what_cannot_be_watched_is_refused(box: Box) -> None:
    for query, status, code in (
        ({"path": "gone"}, 404, "path_not_found"),
        ({"path": ""}, 400, "invalid_path"),
        ({"path": ".", "cursor": "junk"}, 400, "invalid_option"),
        ({"path": ".", "recursive": "deeply"}, 400, "invalid_option"),
        ({"path": ".", "include": "a\0b"}, 400, "invalid_path"),
    ):
        answer = await box.ask("GET", "watch", params=query)
        assert (answer.status, answer.code) == (status, code), query
    answer = await box.ask("HEAD", "watch", params={"path": "."})
    assert answer.status == 405
