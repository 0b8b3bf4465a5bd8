"""Fixtures: a project with an echo agent, and a server for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from app.site import Site, project, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path) -> Iterator[None]:
    """Drop the modules that a test's project imported."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


@pytest_asyncio.fixture
async def site(folder: Path) -> AsyncIterator[Site]:
    async with serve(folder) as site:
        yield site
