"""A sandbox to have terminals in, of every tier."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

TIERS = ["namespaces", pytest.param("gvisor", marks=pytest.mark.gvisor)]
ALL_OF_GVISOR = "SMOKEBOX_SOAK" in os.environ


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try everything with the host's kernel, and what is marked for it, or all, with gVisor's."""
    if "sandbox" in metafunc.fixturenames:
        both = ALL_OF_GVISOR and "kernel_of_the_host" not in metafunc.fixturenames
        both = both or "gvisor_too" in metafunc.fixturenames
        metafunc.parametrize("sandbox", TIERS[: 1 + both], indirect=True)


@pytest.fixture
def gvisor_too() -> None:
    """For what is tried in both tiers each time, and not in a soak only."""


@pytest.fixture
def kernel_of_the_host() -> None:
    """For what gVisor 20221219 lacks: /dev/tty, IUTF8, and editing of lines by keys."""


@pytest_asyncio.fixture
async def sandbox(request: pytest.FixtureRequest, host: Host) -> Sandbox:
    return await host.create("box", tier=request.param)
