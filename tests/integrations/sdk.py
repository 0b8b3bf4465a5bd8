"""Handles of the SDK with a server in a separate process, for the suites of frameworks."""

from __future__ import annotations

import tempfile
import uuid
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING

from client.server_process import server_process
from integrations.engine import destroyed_error
from short_directory import PREFIX
from smokebox import Sandbox, connect
from smokebox.client.sandbox_connection import SandboxConnection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.client.settings import ClientSettings
    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler
    from smokebox.types import SandboxInfo


class SingleUseConnection(SandboxConnection):
    """Creates its sandbox once; a destroyed sandbox is not created again."""

    used = False

    async def create(self) -> SandboxInfo:
        if self.used:
            raise destroyed_error(self.id)
        info = await super().create()
        self.used = True
        return info


class SingleUseSandbox(Sandbox):
    """A sandbox that is destroyed when its handle is closed, and not created again."""

    _connection: SingleUseConnection

    def __init__(
        self,
        id: str,
        transport: Transport,
        settings: ClientSettings,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        super().__init__(id, transport, settings, handlers)
        self._connection = SingleUseConnection(id, transport, settings, handlers or {})

    async def aclose(self) -> None:
        """Destroy it, also if the handle was never used."""
        self._connection.used = True
        await self.destroy()


class Sdk:
    """A server in its own directory, and its client."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        home = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX))
        self._client = connect(self._stack.enter_context(server_process(home)).url)

    def sandbox(self) -> SingleUseSandbox:
        """Create a sandbox."""
        return self._client.sandbox(SingleUseSandbox, f"t{uuid.uuid4().hex}")

    async def find(self, id: str) -> SingleUseSandbox:
        """Return an existing sandbox."""
        sandbox = self._client.sandbox(SingleUseSandbox, id)
        if await sandbox.info() is None:
            raise destroyed_error(id)
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
