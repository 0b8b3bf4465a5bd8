"""File systems with project quotas, and engines with their state directory on one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from quota_file_systems import make_file_system, make_image, open_host, unmount

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from smokebox.engine.host import Host


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system with project quotas: XFS, unless a test names others."""
    path = make_file_system(tmp_path, getattr(request, "param", "xfs"))
    yield path
    unmount(path)


@pytest.fixture
def image(disk: Path) -> Path:
    """The root directory of a small image."""
    return make_image(disk / "image")


@pytest_asyncio.fixture
async def host(disk: Path, image: Path) -> AsyncIterator[Host]:
    """An engine with its state directory on that file system."""
    async with open_host(disk / "home", image) as host:
        yield host
