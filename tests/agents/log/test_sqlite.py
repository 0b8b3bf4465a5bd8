"""The store in a file."""

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

from smokebox.agents.log.conformance import KEY, StoreSuite, created, fill, near, said
from smokebox.agents.log.records import VERSION, MessageAdded
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.log.sqlite_tables import MIGRATIONS
from smokebox.agents.messages import Image, UserMessage
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

    def beside(self, store: SqliteStore) -> SqliteStore:
        return SqliteStore(store.path)


def change(path: str, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)


async def test_files_are_for_their_owner_only(store: SqliteStore) -> None:
    await fill(store, KEY)
    folder = os.path.dirname(store.path)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    modes = {stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(folder)}
    assert modes == {0o600}


async def test_closing_a_store_lets_go_of_its_sessions(path: str, store: SqliteStore) -> None:
    other = SqliteStore(path)
    await (await other.open(KEY)).append([created()])
    with pytest.raises(SessionBusy, match=f"process {os.getpid()}"):
        await store.open(KEY)
    await other.aclose()
    assert (await store.open(KEY)).head == 1


def test_a_store_serves_one_event_loop_after_another(path: str) -> None:
    store = SqliteStore(path)
    for _ in range(3):
        asyncio.run(fill(store, KEY, said("again")))
    assert len(asyncio.run(store.read(KEY))) == 3
    asyncio.run(store.aclose())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_copy_of_the_process_neither_holds_nor_breaks_sessions(path: str) -> None:
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
        # The child has the files open too, and lives on.
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


async def test_a_store_of_a_later_version_names_the_versions(path: str, store: SqliteStore) -> None:
    await fill(store, KEY)
    await store.aclose()
    change(path, "PRAGMA user_version = 99")
    with pytest.raises(
        StoreTooNew, match=rf"version 99.*up to {len(MIGRATIONS)}.*Upgrade"
    ) as caught:
        await SqliteStore(path).read(KEY)
    assert (caught.value.version, caught.value.latest) == (99, len(MIGRATIONS))


async def test_a_record_of_a_later_version_names_its_session(path: str, store: SqliteStore) -> None:
    await fill(store, KEY, created(), said("from the future"))
    change(path, f"UPDATE records SET version = {VERSION + 1} WHERE place = 2")
    assert len(await store.read(KEY, limit=1)) == 1
    with pytest.raises(StoreTooNew, match="agent/one/default is of version"):
        await store.read(KEY)


async def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "theirs.db")
    change(path, "CREATE TABLE theirs (x)")
    with pytest.raises(PathError, match="another program"):
        await SqliteStore(path).sessions()
    (tmp_path / "text.db").write_text("not a database at all, but long enough to look at" * 10)
    with pytest.raises(PathError, match=r"the session store .* is not usable"):
        await SqliteStore(str(tmp_path / "text.db")).sessions()


async def test_a_process_that_comes_and_goes_takes_nothing_along(store: SqliteStore) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    look = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM sessions')"
    for _ in range(2):
        # Were our locks on the file lost, it would be the last to close it, and end our log.
        subprocess.run([sys.executable, "-c", look, store.path], check=True)
        await writer.append([said("more")])
    other = SqliteStore(store.path)
    assert len(await other.read(KEY)) == 3
    await other.aclose()


async def test_many_that_make_the_file_at_once_all_succeed(path: str) -> None:
    stores = [SqliteStore(path) for _ in range(6)]
    await asyncio.gather(*(fill(one, near(f"{number}")) for number, one in enumerate(stores)))
    assert len(await stores[0].sessions()) == 6
    for one in stores:
        await one.aclose()


async def test_a_full_disk_fails_the_append_and_not_the_store(store: SqliteStore) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    assert store._file is not None
    connection = store._file.commits._connection
    [(pages,)] = connection.execute("PRAGMA page_count").fetchall()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull):
        await writer.append([said("x" * 100_000)])
    connection.execute(f"PRAGMA max_page_count = {1 << 30}")
    assert await writer.append([said("again")]) == 2


async def test_blobs_that_nothing_shows_go_after_a_while(path: str, store: SqliteStore) -> None:
    old = await store.put_blob(b"old")
    used = await store.put_blob(b"used")
    await fill(store, near("user"), MessageAdded("w", UserMessage((Image("image/png", used, 4),))))
    change(path, f"UPDATE blobs SET at = {time.time() - 7200}")
    young = await store.put_blob(b"young")
    await fill(store, KEY)
    await store.delete(KEY)
    assert [await store.get_blob(name) for name in (used, young)] == [b"used", b"young"]
    with pytest.raises(NotFound):
        await store.get_blob(old)
