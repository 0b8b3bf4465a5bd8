"""Fixtures that all cases share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities


@pytest.mark.asyncio
class Cases:
    """Fixtures derived from `sandbox`, which a subclass defines."""

    @pytest_asyncio.fixture
    async def capabilities(self, sandbox: SandboxApi) -> Capabilities:
        """Return the capabilities of the sandbox."""
        return await sandbox.capabilities()

    @pytest_asyncio.fixture
    async def directory(self, sandbox: SandboxApi) -> str:
        """Create an empty directory for the case and return its absolute path."""
        path = sandbox.resolve_path(new_id("conformance"))
        await sandbox.mkdir(path, recursive=True)
        return path
