"""Conformance suite over HTTP, with a server in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from client.threaded import Threaded
from smokebox import sync
from smokebox.sandbox.conformance import SandboxSuite
from smokebox.sandbox.conformance.directories import DirectoryCases
from smokebox.sandbox.conformance.files import FileCases
from smokebox.sandbox.conformance.globs import GlobCases
from smokebox.sandbox.conformance.paths import PathCases
from smokebox.sandbox.conformance.symlinks import SymlinkCases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from client.served import Served
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
    def sandbox(self, server: Served) -> Iterator[Threaded]:
        with sync.connect(server.url).create() as sandbox:
            yield Threaded(sandbox)
