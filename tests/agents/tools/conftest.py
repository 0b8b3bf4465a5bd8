"""Each test that asks for `work` runs over every sandbox that needs no server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from agents.tools.workspace import Workspace
from smokebox import bucket, local, virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox import SandboxApi


@asynccontextmanager
async def opened(name: str, folder: Path) -> AsyncIterator[SandboxApi]:
    """The sandbox of that name, empty."""
    if name == "local":
        async with local(cwd=folder) as host:
            yield host
    elif name == "virtual":
        async with virtual() as memory:
            yield memory
    else:
        async with bucket("memory:///") as store:
            yield store


@pytest.fixture(params=["local", "virtual", "bucket"])
async def work(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools over one sandbox after the other."""
    async with opened(request.param, tmp_path) as sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools where there are real processes and permissions."""
    async with opened("local", tmp_path) as sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))
