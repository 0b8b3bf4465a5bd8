"""Server in a separate process, and clients of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from client.served import Served, served
from smokebox.client.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server that all tests share, except those that kill theirs."""
    with served(str(tmp_path_factory.mktemp("served"))) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Client:
    """Yield a new client of that server."""
    return connect(server.url)
