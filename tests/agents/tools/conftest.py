"""Each test that asks for `work` runs over every sandbox that needs no server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agents.tools.workspace import Workspace
from smokebox import local, virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(params=["local", "virtual"])
async def work(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools over one sandbox after the other."""
    sandbox = local(cwd=tmp_path) if request.param == "local" else virtual()
    async with sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools where there are real processes and permissions."""
    async with local(cwd=tmp_path) as sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))
