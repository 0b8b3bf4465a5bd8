"""Hosts, each with a state directory of its own and all with the same layers, and roots."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from engine.root_files import ME
from smokebox.engine.files.rooted import Rooted
from smokebox.engine.host import Host
from smokebox.engine.workers import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the layers of images are kept, made once."""
    return tmp_path_factory.mktemp("images")


@pytest_asyncio.fixture
async def host(tmp_path: Path, layers: Path) -> AsyncIterator[Host]:
    """An engine without a pool, in a fresh state directory."""
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        yield host


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The empty root of a sandbox that is not there."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def files(root: Path) -> Iterator[Rooted]:
    """What is below that root."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield Rooted(fd, ME)
    os.close(fd)


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Threads to look at files with."""
    workers = Workers()
    yield workers
    workers.close()
