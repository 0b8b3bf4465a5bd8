"""The conformance suite over the wire: an SDK handle of a server in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from smokebox.sandbox.conformance import SandboxSuite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox


class TestAsyncHandle(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, client: Client) -> AsyncIterator[Sandbox]:
        async with await client.create() as sandbox:
            yield sandbox
