"""Load: memory stays bounded, and no query scans a whole table.

SMOKEBOX_SOAK=1 runs it with a gigabyte.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from app.site import ECHO, Site, project
from smokebox.agents.log import sqlite_tables
from smokebox.agents.log.records import ReplyDelta
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.log.sqlite_tables import MIGRATIONS
from smokebox.agents.log.store import SessionKey
from smokebox.app import inbox_tables
from smokebox.app.inbox import AppInbox, SubmissionOutcome, WorkTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SOURCE = Path(__file__).parents[2] / "src"
SOAK = "SMOKEBOX_SOAK" in os.environ
MEGABYTE = 1 << 20
# Bytes of the watched conversation, and in a soak test of the whole store.
SIZE, STORE = (200, 1024) if SOAK else (60, 60)
SERVE = (
    "import sys, uvicorn; from smokebox.app import create_app; "
    "uvicorn.run(create_app(sys.argv[1]), port=int(sys.argv[2]), log_level='warning')"
)

pytestmark = pytest.mark.timeout(900 if SOAK else 60)


@contextlib.asynccontextmanager
async def serve_in_process(folder: Path) -> AsyncIterator[tuple[Site, int]]:
    """Serve a project in a separate process; yields the site and its pid."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVE,
        str(folder),
        str(port),
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
    )
    url = f"http://127.0.0.1:{port}"
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as http:
            site = Site(url, http)
            while True:
                assert process.returncode is None
                with contextlib.suppress(aiohttp.ClientError):
                    await site.get("/health")
                    break
                await asyncio.sleep(0.02)
            yield site, process.pid
    finally:
        process.kill()
        await process.wait()


def memory(pid: int) -> int:
    """Return the resident memory of a process in megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // MEGABYTE


async def write_records(folder: Path, id: str, megabytes: int) -> int:
    """Append to a conversation and return its last offset."""
    store = SqliteStore(str(folder / ".smokebox/conversations.db"))
    writer = await store.open(SessionKey("echo", id, "default"))
    text, head = "x" * 10_000, 0
    for _ in range(megabytes):
        head = await writer.append([ReplyDelta("r", text)] * 100)
    await writer.release()
    await store.aclose()
    return head


async def test_watchers_that_do_not_read_take_no_memory(tmp_path: Path) -> None:
    """20 watchers of a growing conversation do not read; a 21st misses nothing."""
    folder = project(tmp_path / "p")
    async with serve_in_process(folder) as (site, pid), contextlib.AsyncExitStack() as opened:
        await site.send("echo/other?wait=result", "hello")
        path, headers = f"{site.url}/agents/echo/long", {"accept": "text/event-stream"}
        for _ in range(20):
            await opened.enter_async_context(site.http.get(path, headers=headers))
        before = memory(pid)
        watching = asyncio.create_task(read_all(site, "/agents/echo/long", 100 * SIZE))
        assert await write_records(folder, "long", SIZE) == 100 * SIZE
        assert await watching == 100 * SIZE
        assert memory(pid) - before < 20 + 20 * 2


async def read_all(site: Site, path: str, count: int) -> int:
    """Read a number of events and check that none is missing."""
    last = 0
    async for one in site.events(path):
        assert one.id == last + 1
        last = one.id
        if last == count:
            break
    return last


async def fill(folder: Path) -> None:
    """Create many conversations, runs and submissions; a gigabyte in a soak test."""
    for number in range(STORE // 20):
        await write_records(folder, f"old{number}", 20)
    inbox = AppInbox(str(folder / ".smokebox/inbox.db"))
    done, body = SubmissionOutcome("completed", {"text": "x" * 500}), {"message": "x" * 500}
    for start in range(0, 100 * STORE, 1000):
        sent = await asyncio.gather(
            *(
                inbox.accept(WorkTarget(kind="workflow", name="add", id=f"r{number}"), body)
                for number in range(start, min(start + 1000, 100 * STORE))
            )
        )
        await asyncio.gather(*(inbox.finish(one.id, done) for one in sent))
    await inbox.aclose()


async def median_times(site: Site, rounds: int = 20) -> dict[str, float]:
    """Return the median time of each request in milliseconds."""
    paths = ("/agents/echo/old0?offset=1900", "/runs/r7", "/workflows/add", "/health")
    times: dict[str, list[float]] = {path: [] for path in (*paths, "POST")}
    for number in range(rounds):
        for path, values in times.items():
            started = time.perf_counter()
            if path == "POST":
                found = await site.send(f"echo/new{number}", "hello")
            else:
                found = await site.get(path)
            assert found.status in (200, 202, 404), path
            values.append((time.perf_counter() - started) * 1e3)
    return {path: sorted(values)[rounds // 2] for path, values in times.items()}


@pytest.mark.skipif(not SOAK, reason="fills a gigabyte: SMOKEBOX_SOAK=1")
async def test_store_of_a_gigabyte_is_served_as_fast_as_an_empty_one(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", agents__echo=ECHO, workflows__add="async def run(ctx): ...\n")
    async with serve_in_process(folder) as (site, _):
        before = await median_times(site)
    await fill(folder)
    assert sum(file.stat().st_size for file in (folder / ".smokebox").iterdir()) > STORE * MEGABYTE
    async with serve_in_process(folder) as (site, pid):
        after = await median_times(site)
        assert memory(pid) < 400
    sys.stderr.write(f"\nempty: {before}\nfull: {after}\n")


def plans(migrations: object, queries: dict[str, str]) -> dict[str, list[str]]:
    """Return SQLite's plan for each query."""
    connection = sqlite3.connect(":memory:")
    for version in migrations:  # type: ignore[attr-defined]
        for statement in version:
            connection.execute(statement)
    found = {}
    for name, query in queries.items():
        count = max(query.count("?"), 0)
        values = (1,) * (2 if "?2" in query else count)
        steps = connection.execute(f"EXPLAIN QUERY PLAN {query}", values).fetchall()
        found[name] = [str(step[3]) for step in steps]
    connection.close()
    return found


def test_no_query_scans_a_whole_table() -> None:
    """Queries of each request use an index: of open work, or of the requested rows."""
    statements = {
        name: sql
        for name, sql in vars(inbox_tables).items()
        if name.isupper() and isinstance(sql, str) and not name.startswith("_")
    }
    inbox = plans(inbox_tables.MIGRATIONS, statements)
    sessions = plans(
        MIGRATIONS,
        {
            name: getattr(sqlite_tables, name)
            for name in ("READ", "FIND", "LIST_INSTANCE", "FAMILY")
        },
    )
    # There are only as many decisions as tool calls that wait for approval.
    small = ("USING INDEX submissions_open", "SCAN decisions", "SCAN family")
    for name, steps in {**inbox, **sessions}.items():
        scans = [one for one in steps if one.startswith("SCAN")]
        assert all(any(word in one for word in small) for one in scans), (name, steps)
    assert len(inbox) > 20
