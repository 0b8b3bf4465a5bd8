"""Handles of the SDK with a server in a separate process, for the suites of frameworks."""

from __future__ import annotations

import tempfile
import uuid
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING

from client.served import served
from integrations.engine import gone
from places import PREFIX
from smokebox import Sandbox, connect
from smokebox.client.sandbox_connection import SandboxConnection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler
    from smokebox.types import SandboxInfo
    from smokebox.wire.requests import Settings


class OneLifeConnection(SandboxConnection):
    """Creates its sandbox once; a destroyed sandbox is not created again."""

    used = False

    async def create(self) -> SandboxInfo:
        if self.used:
            raise gone(self.id)
        info = await super().create()
        self.used = True
        return info


class OwnSandbox(Sandbox):
    """A sandbox that belongs to its handle: closing destroys it, and it is not created again."""

    _connection: OneLifeConnection

    def __init__(
        self,
        id: str,
        transport: Transport,
        settings: Settings,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        super().__init__(id, transport, settings, handlers)
        self._connection = OneLifeConnection(id, transport, settings, handlers or {})

    async def aclose(self) -> None:
        """Destroy it, also if the handle was never used."""
        self._connection.used = True
        await self.destroy()


class Sdk:
    """A server in its own directory, and its client."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        home = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX))
        self._client = connect(self._stack.enter_context(served(home)).url)

    def sandbox(self) -> OwnSandbox:
        """Create a sandbox."""
        return self._client.sandbox(OwnSandbox, f"t{uuid.uuid4().hex}")

    async def find(self, id: str) -> OwnSandbox:
        """Return an existing sandbox."""
        sandbox = self._client.sandbox(OwnSandbox, id)
        if await sandbox.info() is None:
            raise gone(id)
        return sandbox

    def close(self) -> None:
        """Destroy every sandbox and stop the server."""
        self._stack.close()


@cache
def sdk() -> Sdk:
    """Return the server of this session, started by the first call."""
    return Sdk()


def close_sdk() -> None:
    """Stop the server of this session, if it was started."""
    if sdk.cache_info().currsize:
        sdk().close()
        sdk.cache_clear()
