"""The conformance suite for Linux sandboxes: both tiers, as root and as an ordinary user."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.sandbox.conformance import SandboxSuite
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from smokebox import SandboxApi
    from smokebox.engine.host import Host


class TestNamespaces(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, host: Host) -> SandboxApi:
        return host.sandbox("case")


@pytest.mark.gvisor
@pytest.mark.timeout(60)
class TestGvisor(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, host: Host) -> SandboxApi:
        return host.sandbox("case", tier="gvisor")


@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user")
@pytest.mark.timeout(300)
def test_suite_as_an_ordinary_user() -> None:
    rerun_as_nobody(__file__, "TestNamespaces")
