"""Watches over HTTP: events, cursors, limits and release on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest_asyncio

from server.boxes import (
    DEADLINE,
    SandboxClient,
    count_open_files,
    create_sandbox_client,
    eventually,
)
from smokebox.foundation import sse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from smokebox.server.server import RunningServer


class WatchReader:
    """Reads the events of a watch."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._reader = sse.EventReader()
        self._events: list[sse.Event] = []

    async def event(self) -> sse.Event | None:
        """Return the next event; None at the end."""
        async with asyncio.timeout(DEADLINE):
            while not self._events:
                data = await self._response.content.readany()
                if not data:
                    return None
                self._events += self._reader.feed(data)
            return self._events.pop(0)

    async def change(self) -> tuple[str, str]:
        """Return the kind and the path of the next change."""
        event = await self.event()
        assert event is not None
        assert event.name == "change"
        change = msgspec.json.decode(event.data)
        assert change["cursor"] == event.id
        return change["kind"], change["path"].removeprefix("/workspace/")


@pytest_asyncio.fixture
async def sandbox(server: RunningServer, http: aiohttp.ClientSession) -> SandboxClient:
    return await create_sandbox_client(server, http)


@contextlib.asynccontextmanager
async def watching(
    sandbox: SandboxClient, path: str = ".", *, last: str | None = None, **query: Any
) -> AsyncIterator[tuple[WatchReader, str]]:
    """Open a watch, and yield its reader and its first cursor."""
    headers = {"last-event-id": last} if last is not None else {}
    url, params = sandbox.url("watch"), {"path": path, **query}
    async with sandbox.http.get(url, params=params, headers=headers) as response:
        assert (response.status, response.headers["content-type"]) == (200, sse.MEDIA)
        reader = WatchReader(response)
        first = await reader.event()
        assert first is not None
        assert (first.name, msgspec.json.decode(first.data)) == ("watching", {"cursor": first.id})
        yield reader, first.id or ""


async def test_changes_are_streamed_as_they_happen(sandbox: SandboxClient) -> None:
    async with watching(sandbox) as (reader, _):
        await sandbox.write("f", b"x")
        assert await reader.change() == ("create", "f")
        await sandbox.engine.files.mkdir("d")
        assert await reader.change() == ("create", "d")
        await sandbox.engine.exec("echo > 'd/ü #'")
        assert await reader.change() == ("create", "d/ü #")


async def test_watch_is_active_once_the_response_starts(sandbox: SandboxClient) -> None:
    for number in range(10):
        url = sandbox.url("watch")
        async with sandbox.http.get(url, params={"path": "."}) as response:
            # From the response headers on, no change may be missed.
            await sandbox.engine.files.write_file(f"f{number}", b"")
            reader = WatchReader(response)
            await reader.event()
            assert await reader.change() == ("create", f"f{number}")


async def test_watch_resumes_from_a_cursor(sandbox: SandboxClient) -> None:
    async with watching(sandbox) as (reader, start):
        await sandbox.write("a", b"")
        event = await reader.event()
        assert event is not None
        cursor = event.id
    await sandbox.write("b", b"")
    async with watching(sandbox, last=cursor) as (reader, _):
        assert await reader.change() == ("create", "b")
    async with watching(sandbox, cursor=cursor) as (reader, _):
        assert await reader.change() == ("create", "b")
    # A browser that reconnects repeats the URL, and sends a newer header.
    async with watching(sandbox, last=cursor, cursor=start) as (reader, _):
        assert await reader.change() == ("create", "b")


async def test_unknown_cursor_gets_a_resync(sandbox: SandboxClient) -> None:
    async with watching(sandbox, last="0123456789abcdef:7") as (reader, _):
        assert (await reader.change())[0] == "resync"


async def test_include_and_exclude_patterns(sandbox: SandboxClient) -> None:
    await sandbox.engine.files.mkdir("node_modules")
    async with watching(sandbox, include=["*.py", "*.js"]) as (reader, _):
        for name in ("a.txt", "node_modules/b.py", "c.js"):
            await sandbox.write(name, b"")
        assert await reader.change() == ("create", "c.js")
    async with watching(sandbox, exclude="") as (reader, _):
        await sandbox.write("node_modules/d.py", b"")
        assert await reader.change() == ("create", "node_modules/d.py")


async def test_watch_ends_when_the_watched_directory_is_removed(sandbox: SandboxClient) -> None:
    await sandbox.engine.files.mkdir("d")
    async with watching(sandbox, "d") as (reader, _):
        await sandbox.engine.files.rm("d", recursive=True)
        while (event := await reader.event()) is not None:
            assert event.name == "change"
    await eventually(lambda: not sandbox.engine.files.busy)


async def test_sleep_ends_watches_with_an_error(sandbox: SandboxClient) -> None:
    async with watching(sandbox) as (reader, _):
        await sandbox.engine.sleep()
        event = await reader.event()
        assert event is not None
        assert (event.name, msgspec.json.decode(event.data)["code"]) == ("error", "sandbox_gone")
        assert await reader.event() is None


async def test_disconnect_releases_the_watch(sandbox: SandboxClient) -> None:
    async with watching(sandbox) as (_, cursor):
        assert sandbox.engine.files.busy
    await eventually(lambda: not sandbox.engine.files.busy)
    before = count_open_files()
    # The event buffer of the first watch is kept for a while, and all of these share it.
    for _ in range(20):
        async with sandbox.connection(f"GET watch?path=.&cursor={cursor}") as (reader, _):
            await asyncio.wait_for(reader.readuntil(b"watching"), DEADLINE)
        async with sandbox.connection(f"GET watch?path=.&cursor={cursor}"):
            pass
    await sandbox.wait_idle(before)


async def test_disconnect_before_the_watch_is_active_releases_it(sandbox: SandboxClient) -> None:
    await sandbox.engine.exec("mkdir -p d/{0..9}{0..9}{0..9}{0..9}")
    before = count_open_files()
    async with sandbox.connection("GET watch?path=d"):
        await eventually(lambda: sandbox.engine.files.busy)
    await sandbox.wait_idle(before)


async def test_number_of_watches_is_limited(sandbox: SandboxClient) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(8):
            await sandbox.engine.files.mkdir(f"d{number}")
            await stack.enter_async_context(watching(sandbox, f"d{number}"))
        refused = await sandbox.request("GET", "watch", params={"path": "."})
        assert (refused.status, refused.code) == (429, "limit_reached")


async def test_invalid_watches_are_refused(sandbox: SandboxClient) -> None:
    for query, status, code in (
        ({"path": "gone"}, 404, "path_not_found"),
        ({"path": ""}, 400, "invalid_path"),
        ({"path": ".", "cursor": "junk"}, 400, "invalid_option"),
        ({"path": ".", "recursive": "deeply"}, 400, "invalid_option"),
        ({"path": ".", "include": "a\0b"}, 400, "invalid_path"),
    ):
        response = await sandbox.request("GET", "watch", params=query)
        assert (response.status, response.code) == (status, code), query
    response = await sandbox.request("HEAD", "watch", params={"path": "."})
    assert response.status == 405
