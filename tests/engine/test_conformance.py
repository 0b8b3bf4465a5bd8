"""The conformance suite over a Linux sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from smokebox.sandbox.conformance import SandboxSuite

if TYPE_CHECKING:
    from smokebox import SandboxApi
    from smokebox.engine.host import Host


class TestNamespaces(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, host: Host) -> SandboxApi:
        return host.sandbox("case")
