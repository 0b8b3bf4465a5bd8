"""A sandbox of every isolation tier."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

TIERS = ["namespaces", pytest.param("gvisor", marks=pytest.mark.gvisor)]
SOAK = "SMOKEBOX_SOAK" in os.environ


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run all tests in namespaces, and those for every tier, or in a soak all, in gVisor."""
    if "sandbox" in metafunc.fixturenames:
        both = SOAK and "host_kernel_only" not in metafunc.fixturenames
        both = both or "every_tier" in metafunc.fixturenames
        metafunc.parametrize("sandbox", TIERS[: 1 + both], indirect=True)


@pytest.fixture
def every_tier() -> None:
    """Marks tests that run in every tier each time, and not only in a soak."""


@pytest.fixture
def host_kernel_only() -> None:
    """Marks tests of features that gVisor 20221219 lacks: /dev/tty, IUTF8 and line editing."""


@pytest_asyncio.fixture
async def sandbox(request: pytest.FixtureRequest, host: Host) -> Sandbox:
    return await host.create("box", tier=request.param)
