"""An engine with a small base image, for builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from building import build_base
from smokebox.engine.host import Host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture
async def based(tmp_path: Path) -> AsyncIterator[Host]:
    """An engine with the image `base:1`, in a new state directory."""
    async with await Host.open(tmp_path / "home", pool=0) as host:
        await build_base(host)
        yield host
