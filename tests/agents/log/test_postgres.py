"""The store in Postgres, over a real server."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from smokebox.agents.log.conformance import KEY, PATIENCE, StoreSuite, created, fill, said, take
from smokebox.agents.log.postgres import PostgresStore
from smokebox.agents.log.postgres_tables import MIGRATIONS, migrate
from smokebox.errors import (
    Fenced,
    InvalidOption,
    NotFound,
    ServiceUnavailable,
    SessionBusy,
    StoreTooNew,
    Unauthorized,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture
async def store(database: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(database)
    yield store
    await store.aclose()


class TestPostgresStore(StoreSuite):
    @pytest_asyncio.fixture
    async def store(self, database: str) -> AsyncIterator[PostgresStore]:
        store = PostgresStore(database)
        yield store
        await store.aclose()

    def beside(self, store: PostgresStore) -> PostgresStore:
        return PostgresStore(store._pool._url)


async def ask(url: str, sql: str, *values: object) -> Any:
    import asyncpg  # type: ignore[import-untyped]

    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql, *values)
    finally:
        await connection.close()


async def cut_off(database: str) -> None:
    """End every connection of the database but this one."""
    await ask(
        database,
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND query LIKE '%smokebox_%'",
    )


async def test_a_writer_that_lost_its_connections_goes_on(
    database: str, store: PostgresStore
) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    await cut_off(database)
    assert await writer.append([said("after")]) == 2
    async with asyncio.timeout(PATIENCE):
        while not await ask(database, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"):
            await asyncio.sleep(0.01)
    other = PostgresStore(database)
    with pytest.raises(SessionBusy, match=f"process {os.getpid()} on "):
        await other.open(KEY)
    await other.aclose()


async def test_a_writer_whose_lock_was_lost_and_taken_is_fenced(
    database: str, store: PostgresStore
) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    # As if another were quicker to take the lock that the server has dropped.
    store._pool._held.clear()
    await cut_off(database)
    other = PostgresStore(database)
    taken = await other.open(KEY, wait=10)
    with pytest.raises(Fenced):
        await writer.append([said("late")])
    assert await taken.append([said("mine")]) == 2
    await other.aclose()


async def test_an_append_whose_answer_was_lost_is_not_made_twice(
    database: str, store: PostgresStore
) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    # The server has done it, and we have not heard so.
    await writer.append([said("once")])
    writer._head = 1
    assert await writer.append([said("once")]) == 2
    assert len(await store.read(KEY)) == 2


async def test_a_follower_that_lost_its_connections_goes_on(
    database: str, store: PostgresStore
) -> None:
    await fill(store, KEY, created())
    following = asyncio.create_task(take(store, KEY, 2))
    await asyncio.sleep(0)
    await cut_off(database)
    other = PostgresStore(database)
    await fill(other, KEY, said("more"))
    await other.aclose()
    assert len(await following) == 2


async def test_a_store_of_a_later_version_names_the_versions(
    database: str, store: PostgresStore
) -> None:
    await fill(store, KEY)
    await ask(database, "UPDATE smokebox_version SET version = 99")
    later = PostgresStore(database)
    with pytest.raises(StoreTooNew, match=f"version 99.*up to {len(MIGRATIONS)}"):
        await later.read(KEY)
    await later.aclose()


async def test_an_older_store_is_brought_up_to_date_with_what_it_holds(database: str) -> None:
    import asyncpg

    first = ("CREATE TABLE notes (words text)", "INSERT INTO notes VALUES ('kept')")
    second = ("ALTER TABLE notes ADD COLUMN stars integer NOT NULL DEFAULT 5",)
    connection = await asyncpg.connect(database)
    await migrate(connection, [first])
    await migrate(connection, [first, second])
    await migrate(connection, [first, second])
    assert [tuple(row) for row in await connection.fetch("SELECT * FROM notes")] == [("kept", 5)]
    await connection.close()


async def test_many_that_make_the_tables_at_once_all_succeed(database: str) -> None:
    stores = [PostgresStore(database) for _ in range(5)]
    found = await asyncio.gather(*(store.sessions() for store in stores))
    assert found == [[]] * 5
    for store in stores:
        await store.aclose()


async def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    store = PostgresStore(f"postgres://me:secret@/db?host={tmp_path}")
    with pytest.raises(ServiceUnavailable, match="postgres://me@/db cannot be reached") as caught:
        await store.sessions()
    assert "secret" not in str(caught.value)
    await store.aclose()


async def test_what_the_server_refuses_is_told_apart(postgres: str) -> None:
    for url, error in (
        (f"postgres://smokebox@/none?host={postgres}", NotFound),
        (f"postgres://stranger@/postgres?host={postgres}", Unauthorized),
        ("postgres://host:port/db", InvalidOption),
    ):
        store = PostgresStore(url)
        with pytest.raises(error):
            await store.sessions()
        await store.aclose()
