"""Tests of the Postgres store, with a real server."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from smokebox.agents.log.conformance import (
    KEY,
    TIMEOUT,
    StoreSuite,
    created,
    follow,
    note,
    write_session,
)
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

    def reopen(self, store: PostgresStore) -> PostgresStore:
        return PostgresStore(store._pool._url)


async def query(url: str, sql: str, *values: object) -> Any:
    import asyncpg  # type: ignore[import-untyped]

    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(sql, *values)
    finally:
        await connection.close()


async def terminate_connections(database: str) -> None:
    """Terminate all connections to the database except this one."""
    await query(
        database,
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND query LIKE '%smokebox_%'",
    )


async def test_writer_survives_lost_connections(database: str, store: PostgresStore) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    await terminate_connections(database)
    assert await writer.append([note("after")]) == 2
    async with asyncio.timeout(TIMEOUT):
        while not await query(
            database, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        ):
            await asyncio.sleep(0.01)
    other = PostgresStore(database)
    with pytest.raises(SessionBusy, match=f"process {os.getpid()} on "):
        await other.open(KEY)
    await other.aclose()


async def test_writer_whose_lock_was_taken_is_fenced(database: str, store: PostgresStore) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    # As if another process were faster to take the lock.
    store._pool._held.clear()
    await terminate_connections(database)
    other = PostgresStore(database)
    taken = await other.open(KEY, wait=10)
    with pytest.raises(Fenced):
        await writer.append([note("late")])
    assert await taken.append([note("mine")]) == 2
    await other.aclose()


async def test_append_with_lost_response_is_not_repeated(
    database: str, store: PostgresStore
) -> None:
    writer = await store.open(KEY)
    await writer.append([created()])
    # As if the response were lost.
    await writer.append([note("once")])
    writer._head = 1
    assert await writer.append([note("once")]) == 2
    assert len(await store.read(KEY)) == 2


async def test_follower_survives_lost_connections(database: str, store: PostgresStore) -> None:
    await write_session(store, KEY, created())
    following = asyncio.create_task(follow(store, KEY, 2))
    await asyncio.sleep(0)
    await terminate_connections(database)
    other = PostgresStore(database)
    await write_session(other, KEY, note("more"))
    await other.aclose()
    assert len(await following) == 2


async def test_newer_store_error_names_the_versions(database: str, store: PostgresStore) -> None:
    await write_session(store, KEY)
    await query(database, "UPDATE smokebox_version SET version = 99")
    later = PostgresStore(database)
    with pytest.raises(StoreTooNew, match=f"version 99.*up to {len(MIGRATIONS)}"):
        await later.read(KEY)
    await later.aclose()


async def test_older_store_is_migrated_with_its_data(database: str) -> None:
    import asyncpg

    first = ("CREATE TABLE notes (words text)", "INSERT INTO notes VALUES ('kept')")
    second = ("ALTER TABLE notes ADD COLUMN stars integer NOT NULL DEFAULT 5",)
    connection = await asyncpg.connect(database)
    await migrate(connection, [first])
    await migrate(connection, [first, second])
    await migrate(connection, [first, second])
    assert [tuple(row) for row in await connection.fetch("SELECT * FROM notes")] == [("kept", 5)]
    await connection.close()


async def test_concurrent_migrations_succeed(database: str) -> None:
    stores = [PostgresStore(database) for _ in range(5)]
    found = await asyncio.gather(*(store.sessions() for store in stores))
    assert found == [[]] * 5
    for store in stores:
        await store.aclose()


async def test_error_for_unreachable_server_hides_the_password(tmp_path: Path) -> None:
    store = PostgresStore(f"postgres://me:secret@/db?host={tmp_path}")
    with pytest.raises(ServiceUnavailable, match="postgres://me@/db cannot be reached") as caught:
        await store.sessions()
    assert "secret" not in str(caught.value)
    await store.aclose()


async def test_login_errors_have_different_types(postgres: str) -> None:
    for url, error in (
        (f"postgres://smokebox@/none?host={postgres}", NotFound),
        (f"postgres://stranger@/postgres?host={postgres}", Unauthorized),
        ("postgres://host:port/db", InvalidOption),
    ):
        store = PostgresStore(url)
        with pytest.raises(error):
            await store.sessions()
        await store.aclose()
