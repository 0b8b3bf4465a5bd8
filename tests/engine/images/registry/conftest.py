"""Registries without and with authorization, and a proxy in front of one that misbehaves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from registry_server import RegistryProxy, RegistryServer, htpasswd_auth, run_registry
from smokebox.engine.images.catalog import ImageCatalog
from smokebox.engine.images.layer_store import LayerStore
from smokebox.engine.record.record import Record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A registry without authorization."""
    with run_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(scope="session")
def password_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """A registry with basic authorization."""
    directory = tmp_path_factory.mktemp("password-registry")
    with run_registry(directory, htpasswd_auth(directory)) as server:
        yield server


@dataclass(frozen=True)
class Stores:
    """A catalog and a layer store."""

    catalog: ImageCatalog
    layers: LayerStore


@pytest_asyncio.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Stores]:
    """An empty catalog and layer store."""
    record = await Record.open(str(tmp_path / "record.db"))
    layers = LayerStore(str(tmp_path / "layers"))
    try:
        yield Stores(ImageCatalog(record, layers), layers)
    finally:
        layers.close()
        await record.aclose()


@pytest_asyncio.fixture
async def proxy(registry: RegistryServer) -> AsyncIterator[RegistryProxy]:
    """A proxy in front of the registry without authorization."""
    async with RegistryProxy(registry).open() as proxy:
        yield proxy


@pytest.fixture
def repository() -> str:
    """The name of an empty repository."""
    return f"test/image-{next(_numbers)}"
