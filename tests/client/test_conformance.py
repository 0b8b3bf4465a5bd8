"""Conformance suite over HTTP, with a server in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from client.threaded_sandbox import ThreadedSandbox
from smokebox import sync
from smokebox.sandbox.conformance import SandboxSuite
from smokebox.sandbox.conformance.files import DirectoryCases, FileCases
from smokebox.sandbox.conformance.paths import GlobCases, PathCases, SymlinkCases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from client.server_process import ServerProcess
    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox


class TestHandle(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, client: Client) -> AsyncIterator[Sandbox]:
        async with await client.create() as sandbox:
            yield sandbox


class TestFacade(PathCases, FileCases, DirectoryCases, SymlinkCases, GlobCases):
    """Files only: a call in a thread cannot be cancelled, and streams are iterators."""

    @pytest.fixture
    def sandbox(self, server: ServerProcess) -> Iterator[ThreadedSandbox]:
        with sync.connect(server.url).create() as sandbox:
            yield ThreadedSandbox(sandbox)
