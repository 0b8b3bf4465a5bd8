"""Builds onto a disk that becomes full: a typed error, nothing left, and the next build works."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from building import BASE, build, build_base
from small_disk import small_disk
from smokebox.engine.host import Host
from smokebox.errors import BuildFailed, StorageFull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

MIB = 1 << 20
LARGE = random.Random(1).randbytes(9 * MIB)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 24 MiB."""
    with small_disk(tmp_path, "size=24m") as path:
        yield path


@pytest_asyncio.fixture
async def host(small: Path) -> AsyncIterator[Host]:
    """An engine on the small disk, with the base image."""
    async with await Host.open(small / "home", pool=0) as host:
        await build_base(host)
        yield host


def free(host: Host) -> int:
    found = os.statvfs(host.home)
    return found.f_bavail * found.f_frsize


async def check_works(host: Host, before: int) -> None:
    """Check that nothing is left of a failed build, and that another one works."""
    assert os.listdir(os.path.join(host.home, "boxes")) == []
    assert [one.names for one in await host.images.list()] == [(BASE,)]
    await host.images.prune()
    assert free(host) > before - MIB
    built = await build(host, f"FROM {BASE}\nRUN echo works > /f && cat /f")
    assert built.output == "works\n"


async def test_a_command_that_fills_the_disk_fails_with_its_message(host: Host) -> None:
    before = free(host)
    with pytest.raises(BuildFailed) as caught:
        await build(host, f"FROM {BASE}\nRUN cat /dev/zero > /large")
    assert caught.value.line == 2
    assert caught.value.exit_code
    assert "No space left" in str(caught.value.output)
    await check_works(host, before)


async def test_a_copy_that_fills_the_disk_names_the_disk(host: Host) -> None:
    before = free(host)
    with pytest.raises(BuildFailed, match="no space left") as caught:
        await build(host, f"FROM {BASE}\nCOPY f /f\nCOPY f /g\n", {"f": LARGE})
    assert caught.value.line == 3
    assert isinstance(caught.value.__cause__, StorageFull)
    host.builds.content.clear(scope="")
    await host.builds.cache.clear("")
    await check_works(host, before)


async def test_an_upload_that_fills_the_disk_leaves_nothing(host: Host) -> None:
    before = free(host)
    with pytest.raises(StorageFull):
        await build(
            host, f"FROM {BASE}\nCOPY . /f\n", {str(n): LARGE + bytes([n]) for n in range(3)}
        )
    host.builds.content.clear(scope="")
    await check_works(host, before)
