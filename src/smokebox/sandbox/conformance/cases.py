"""What all cases share: the fixtures that follow from `sandbox`."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities


@pytest.mark.asyncio
class Cases:
    """The fixtures of a suite whose subclass gives `sandbox`."""

    @pytest_asyncio.fixture
    async def able(self, sandbox: SandboxApi) -> Capabilities:
        """What the sandbox says it can do."""
        return await sandbox.capabilities()

    @pytest_asyncio.fixture
    async def place(self, sandbox: SandboxApi) -> str:
        """A fresh directory of the case's own, as an absolute path."""
        path = sandbox.resolve_path(f"conformance-{uuid.uuid4().hex[:12]}")
        await sandbox.mkdir(path, recursive=True)
        return path
