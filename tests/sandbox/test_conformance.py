"""The conformance suite over the host and over the virtual sandbox in all its forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from smokebox import local, virtual
from smokebox.sandbox.conformance import SandboxSuite
from smokebox.sandbox.virtual import VirtualLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox import SandboxApi


class TestLocal(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, tmp_path: Path) -> AsyncIterator[SandboxApi]:
        sandbox = local(cwd=str(tmp_path))
        yield sandbox
        await sandbox.aclose()


class TestVirtual(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncIterator[SandboxApi]:
        sandbox = virtual()
        yield sandbox
        await sandbox.aclose()


class TestVirtualWithAFreshShell(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncIterator[SandboxApi]:
        sandbox = virtual(shell="fresh")
        yield sandbox
        await sandbox.aclose()


class TestVirtualWithLargeFiles(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncIterator[SandboxApi]:
        sandbox = virtual(limits=VirtualLimits(file_size=64_000_000, storage=256_000_000))
        yield sandbox
        await sandbox.aclose()


class TestVirtualInAProcess(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncIterator[SandboxApi]:
        sandbox = virtual(isolation="process")
        yield sandbox
        await sandbox.aclose()
