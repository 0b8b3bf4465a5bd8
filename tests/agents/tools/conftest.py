"""Each test that asks for `work` runs over every sandbox that needs no server."""

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
async def opened(name: str, folder: Path) -> AsyncIterator[SandboxApi]:
    """The sandbox of that name, empty."""
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
def _engine_ends() -> Iterator[None]:
    yield
    close_engine()


@pytest.fixture(scope="session", params=["local", "virtual", "bucket", "linux"])
def kind(request: pytest.FixtureRequest) -> str:
    """One sandbox after the other, by name."""
    name: str = request.param
    if name == "linux":
        engine()
    return name


@pytest.fixture
async def work(kind: str, tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools over each sandbox."""
    async with opened(kind, tmp_path) as sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Workspace]:
    """The tools where there are real processes and permissions."""
    async with opened("local", tmp_path) as sandbox:
        yield Workspace(sandbox, outputs=str(tmp_path / ".outputs"))
