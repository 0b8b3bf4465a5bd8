"""Server in a separate process, and clients of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from client.server_process import ServerProcess, server_process
from smokebox.client.client import Client, connect

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yield a server that all tests share, except those that kill theirs."""
    with server_process(str(tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Client:
    """Return a client of the shared server."""
    return connect(server.url)
