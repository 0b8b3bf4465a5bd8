"""A server in a process of its own, and clients of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from client.served import Served, served
from smokebox.client.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that all tests share, but for those which kill theirs."""
    with served(str(tmp_path_factory.mktemp("served"))) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Client:
    """A client of that server, which knows nothing yet."""
    return connect(server.url)
