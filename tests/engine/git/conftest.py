"""A git server for each test, with shared repositories."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from engine.git.git_server import GitServer, git, make_repository

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine import Host, Sandbox


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of `project.git`, `empty.git`, and the incompressible `large.git`."""
    root = tmp_path_factory.mktemp("repositories")
    make_repository(root)
    git("init", "--quiet", "--bare", "--initial-branch=trunk", str(root / "empty.git"), cwd=root)
    work = root / "large"
    work.mkdir()
    git("init", "--quiet", "--initial-branch=main", cwd=work)
    for number in range(4):
        (work / f"{number}.bin").write_bytes(os.urandom(1 << 20))
    git("add", ".", cwd=work)
    git("commit", "--quiet", "-m", "Large", cwd=work)
    git("clone", "--quiet", "--bare", str(work), str(root / "large.git"), cwd=root)
    git("config", "pack.window", "0", cwd=root / "large.git")
    return root


@pytest_asyncio.fixture
async def server(repositories: Path) -> AsyncIterator[GitServer]:
    """A server of these repositories."""
    server = GitServer(repositories)
    async with server.serving():
        yield server


@pytest.fixture
def sandbox(host: Host) -> Sandbox:
    """A sandbox to clone into."""
    return host.sandbox("git")
