"""An engine with a small base image, for builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from building import build_base
from smokebox.engine.host import Host
from smokebox.engine.images.registry.access import RegistrySettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest_asyncio.fixture
async def based(tmp_path: Path) -> AsyncIterator[Host]:
    """An engine with the image `base:1`, in a new state directory."""
    # Nothing listens there: an unknown base is not looked for in the network.
    offline = RegistrySettings(default="127.0.0.1:1")
    async with await Host.open(tmp_path / "home", pool=0, registries=offline) as host:
        await build_base(host)
        yield host
