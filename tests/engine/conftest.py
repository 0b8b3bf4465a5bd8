"""Engines on new state directories with shared image layers, and plain directories as roots."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from engine.root_files import ME
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.engine.workers import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from obstore.store import S3Store

    from smokebox.testing import SeaweedServer


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of image layers, shared by all hosts."""
    return tmp_path_factory.mktemp("images")


@pytest_asyncio.fixture
async def host(tmp_path: Path, layers: Path) -> AsyncIterator[Host]:
    """An engine without a pool, in a new state directory."""
    # Nothing listens there: an unknown image is not looked for in the network.
    offline = RegistrySettings(default="127.0.0.1:1")
    async with await Host.open(
        tmp_path / "home", pool=0, images=layers, registries=offline
    ) as host:
        yield host


@pytest.fixture
def bucket(seaweed: SeaweedServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """An empty bucket, with its endpoint and credentials in the environment."""
    from obstore.store import S3Store

    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    monkeypatch.setenv("AWS_REGION", seaweed.region)
    return S3Store(bucket_name, client_options={"allow_http": True})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty directory as the root of a sandbox."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def files(root: Path) -> Iterator[RootedFiles]:
    """The files below that root."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield RootedFiles(fd, ME)
    os.close(fd)


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Worker threads, closed at the end."""
    workers = Workers()
    yield workers
    workers.close()
