"""Tests of the store in an SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.agents.log.conformance import KEY, StoreSuite, created, note, sibling, write_session
from smokebox.agents.log.records import VERSION, MessageAdded
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.log.sqlite_tables import MIGRATIONS
from smokebox.agents.messages import ImagePart, UserMessage
from smokebox.errors import NotFound, PathError, SessionBusy, StorageFull, StoreTooNew

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "home" / "agents.db")


@pytest_asyncio.fixture
async def store(path: str) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    await store.aclose()


class TestSqliteStore(StoreSuite):
    @pytest_asyncio.fixture
    async def store(self, path: str) -> AsyncIterator[SqliteStore]:
        store = SqliteStore(path)
        yield store
        await store.aclose()

    def reopen(self, store: SqliteStore) -> SqliteStore:
        return SqliteStore(store.path)


def change(path: str, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)


async def test_files_are_private(store: SqliteStore) -> None:
    await write_session(store, KEY)
    folder = os.path.dirname(store.path)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    modes = {stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(folder)}
    assert modes == {0o600}


async def test_aclose_releases_sessions(path: str, store: SqliteStore) -> None:
    other = SqliteStore(path)
    await (await other.open(KEY)).append([created()])
    with pytest.raises(SessionBusy, match=f"process {os.getpid()}"):
        await store.open(KEY)
    await other.aclose()
    assert (await store.open(KEY)).head == 1


def test_store_works_in_several_event_loops(path: str) -> None:
    store = SqliteStore(path)
    for _ in range(3):
        asyncio.run(write_session(store, KEY, note("again")))
    assert len(asyncio.run(store.read(KEY))) == 3
    asyncio.run(store.aclose())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_does_not_hold_sessions(path: str) -> None:
    async def work() -> None:
        store = SqliteStore(path)
        writer = await store.open(KEY)
        await writer.append([created()])
        hold, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(done)
            os.read(hold, 1)
            os._exit(0)
        # The child has the files open too.
        await store.aclose()
        other = SqliteStore(path)
        try:
            assert (await other.open(KEY)).head == 1
        finally:
            os.close(done)
            os.waitpid(pid, 0)
            os.close(hold)
            await other.aclose()

    asyncio.run(work())


async def test_newer_store_error_names_the_versions(path: str, store: SqliteStore) -> None:
    await write_session(store, KEY)
    await store.aclose()
    change(path, "PRAGMA user_version = 99")
    with pytest.raises(
        StoreTooNew, match=rf"version 99.*up to {len(MIGRATIONS)}.*Upgrade"
    ) as caught:
        await SqliteStore(path).read(KEY)
    assert (caught.value.version, caught.value.latest) == (99, len(MIGRATIONS))


async def test_newer_record_error_names_the_session(path: str, store: SqliteStore) -> None:
    await write_session(store, KEY, created(), note("from the future"))
    change(path, f"UPDATE records SET version = {VERSION + 1} WHERE place = 2")
    assert len(await store.read(KEY, limit=1)) == 1
    with pytest.raises(StoreTooNew, match="agent/one/default is of version"):
        await store.read(KEY)


async def test_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "theirs.db")
    change(path, "CREATE TABLE theirs (x)")
    with pytest.raises(PathError, match="another program"):
        await SqliteStore(path).sessions()
    (tmp_path / "text.db").write_text("not a database at all, but long enough to query at" * 10)
    with pytest.raises(PathError, match=r"the session store .* is not usable"):
        await SqliteStore(str(tmp_path / "text.db")).sessions()


async def test_other_process_does_not_remove_the_write_ahead_log(store: SqliteStore) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    query = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM sessions')"
    for _ in range(2):
        # Without our locks on the file, this process would remove its write-ahead log.
        subprocess.run([sys.executable, "-c", query, store.path], check=True)
        await writer.append([note("more")])
    other = SqliteStore(store.path)
    assert len(await other.read(KEY)) == 3
    await other.aclose()


async def test_concurrent_creation_succeeds(path: str) -> None:
    stores = [SqliteStore(path) for _ in range(6)]
    await asyncio.gather(
        *(write_session(one, sibling(f"{number}")) for number, one in enumerate(stores))
    )
    assert len(await stores[0].sessions()) == 6
    for one in stores:
        await one.aclose()


async def test_store_is_usable_after_a_full_disk(store: SqliteStore) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    assert store._file is not None
    connection = store._file.writer._connection
    [(pages,)] = connection.execute("PRAGMA page_count").fetchall()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull):
        await writer.append([note("x" * 100_000)])
    connection.execute(f"PRAGMA max_page_count = {1 << 30}")
    assert await writer.append([note("again")]) == 2


async def test_unused_blobs_are_deleted_after_a_while(path: str, store: SqliteStore) -> None:
    old = await store.put_blob(b"old")
    used = await store.put_blob(b"used")
    await write_session(
        store, sibling("user"), MessageAdded("w", UserMessage((ImagePart("image/png", used, 4),)))
    )
    change(path, f"UPDATE blobs SET at = {time.time() - 7200}")
    young = await store.put_blob(b"young")
    await write_session(store, KEY)
    await store.delete(KEY)
    assert [await store.get_blob(name) for name in (used, young)] == [b"used", b"young"]
    with pytest.raises(NotFound):
        await store.get_blob(old)
