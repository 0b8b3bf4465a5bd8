"""Handles of the SDK, whose server is in a process of its own, for the suites of frameworks."""

from __future__ import annotations

import tempfile
import uuid
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING

from client.served import served
from integrations.engine import gone
from smokebox import Sandbox, connect

if TYPE_CHECKING:
    from smokebox.types import SandboxInfo


class OwnSandbox(Sandbox):
    """A sandbox that is its handle's own: closing destroys it, and nobody makes it again."""

    _known = False

    async def _find(self) -> SandboxInfo:
        if self._known:
            raise gone(self.id)
        info = await super()._find()
        self._known = True
        return info

    async def aclose(self) -> None:
        """Destroy it, which a handle that was never used does too."""
        self._known = True
        await self.destroy()


class Sdk:
    """A server in a directory of its own, and its client."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        home = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="smokebox-tests-"))
        self._client = connect(self._stack.enter_context(served(home)).url)

    def sandbox(self) -> OwnSandbox:
        """A sandbox that was never there."""
        return self._client.sandbox(OwnSandbox, f"t{uuid.uuid4().hex}")

    async def find(self, id: str) -> OwnSandbox:
        """A sandbox that is there."""
        sandbox = self._client.sandbox(OwnSandbox, id)
        if await sandbox.info() is None:
            raise gone(id)
        return sandbox

    def close(self) -> None:
        """End every sandbox and the server."""
        self._stack.close()


@cache
def sdk() -> Sdk:
    """The server of this session, started by the first who asks."""
    return Sdk()


def close_sdk() -> None:
    """Stop the server of this session, if anybody asked for it."""
    if sdk.cache_info().currsize:
        sdk().close()
        sdk.cache_clear()
