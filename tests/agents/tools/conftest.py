"""Fixtures: tests with `work` run in every sandbox that needs no server."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from agents.tools.workspace import Workspace
from integrations.engine import close_engine, engine
from smokebox import bucket, local, virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from smokebox import SandboxApi


@asynccontextmanager
async def open_sandbox(name: str, folder: Path) -> AsyncIterator[SandboxApi]:
    """Open an empty sandbox by name."""
    if name == "local":
        async with local(cwd=folder) as host:
            yield host
    elif name == "virtual":
        async with virtual() as memory:
            yield memory
    elif name == "linux":
        async with aclosing(engine().sandbox()) as jail:
            yield jail
    else:
        async with bucket("memory:///") as store:
            yield store


@pytest.fixture(scope="session", autouse=True)
def _close_engine() -> Iterator[None]:
    yield
    close_engine()


@pytest.fixture(scope="session", params=["local", "virtual", "bucket", "linux"])
def kind(request: pytest.FixtureRequest) -> str:
    """Name of the sandbox."""
    name: str = request.param
    if name == "linux":
        engine()
    return name


@pytest.fixture
async def work(kind: str, tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools of each sandbox."""
    async with open_sandbox(kind, tmp_path) as sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools of a local sandbox, with real processes and permissions."""
    async with open_sandbox("local", tmp_path) as sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))
