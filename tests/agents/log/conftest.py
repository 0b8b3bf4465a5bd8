"""Fixtures: a Postgres server per test worker, and a schema per test."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from agents.log.postgres_server import postgres_server

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The directory of the socket of a Postgres server."""
    with postgres_server() as folder:
        yield folder


@pytest.fixture
async def database(postgres: str) -> str:
    """The URL of a database with an empty schema."""
    import asyncpg  # type: ignore[import-untyped]

    url = f"postgresql://smokebox@/postgres?host={postgres}"
    schema = f"test_{next(_NUMBERS)}"
    connection = await asyncpg.connect(url)
    await connection.execute(f"CREATE SCHEMA {schema}")
    await connection.close()
    return f"{url}&search_path={schema}"
