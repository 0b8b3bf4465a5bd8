"""Hosts for the tests: each with a state directory of its own, all with the same layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.engine.host import Host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
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
