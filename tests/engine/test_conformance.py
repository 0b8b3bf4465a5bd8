"""The conformance suite over Linux sandboxes: in both tiers, by root and by an ordinary user."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from ordinary import passes_for_nobody
from smokebox.sandbox.conformance import SandboxSuite

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


@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user")
@pytest.mark.timeout(300)
def test_the_same_by_an_ordinary_user() -> None:
    passes_for_nobody(__file__, "TestNamespaces")
