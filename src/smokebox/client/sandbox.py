"""The handle of a Linux sandbox: nothing starts until its first call.

It satisfies the contract of `smokebox.sandbox.api`, so an agent can work in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from smokebox.client.backups import BackupsOf
from smokebox.client.code import Code
from smokebox.client.git import Git
from smokebox.client.mounts import Mounts
from smokebox.client.network import Network
from smokebox.client.ports import Ports
from smokebox.client.processes import Processes
from smokebox.client.sessions import Sessions
from smokebox.client.settings import (
    Asked,
    SandboxSettings,
    check_network,
    declared,
    parse_settings,
)
from smokebox.client.terminals import Terminals
from smokebox.client.transfers import Transfers
from smokebox.errors import NotFound
from smokebox.types import Capabilities, SandboxInfo, SandboxStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler
    from smokebox.wire.requests import Settings


class Sandbox(
    Sessions, Code, Transfers, Processes, Terminals, Ports, Git, Mounts, BackupsOf, Network
):
    """One sandbox by its id. Handles are cheap, and as many as one likes may have one id.

    A subclass says by its attributes how its sandboxes are: `class Small(Sandbox): limits =
    "lite"`. Made by `get_sandbox`, or by `create` for one that ends with its block. Used by
    `async with`, a sandbox that `create` made is destroyed at the end.
    """

    declared: ClassVar[Mapping[str, Any]] = {}
    """The settings that a subclass and its parents have as attributes."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.declared = {**cls.declared, **declared(cls)}
        check_network(cls.declared)

    def __init__(
        self,
        id: str,
        transport: Transport,
        settings: Settings,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        super().__init__(id, transport, settings, handlers)
        self._ends = False

    @classmethod
    def get(cls, id: str, **settings: Unpack[SandboxSettings]) -> Self:
        """The sandbox of that id on the default server, as `get_sandbox` does."""
        from smokebox.client.client import get_sandbox

        return get_sandbox(cls, id, **settings)

    @classmethod
    async def create(cls, **settings: Unpack[SandboxSettings]) -> Self:
        """A sandbox under a random id on the default server, destroyed at the end of its block."""
        from smokebox.client.client import default_client

        return await default_client().create(cls, **settings)

    async def info(self) -> SandboxInfo | None:
        """What is known of it without waking it or making it; None where there is none."""
        try:
            return await self._transport.ask(SandboxInfo, "GET", self._root)
        except NotFound:
            return None

    async def stats(self) -> SandboxStats:
        """What it uses at this moment, without waking it."""
        return await self._ask(SandboxStats, "GET", "/stats")

    async def capabilities(self) -> Capabilities:
        """What this sandbox can and cannot do; wakes it."""
        return await self._ask(Capabilities, "GET", "/capabilities", timeout=None)

    async def update(self, **settings: Unpack[SandboxSettings]) -> SandboxInfo:
        """Have it be so from its next call on; what is left out stays. Makes it if need be."""
        before = Asked(settings=self._settings, handlers=self._channel.handlers)
        asked = parse_settings("update()", dict(settings))
        self._settings = asked.over(before).settings
        self._channel.handlers.update(asked.handlers)
        if asked.handlers and self._found:
            # Before the policy names them: from then on they are asked for.
            await self._channel.open()
        return await self._put(self._settings)

    async def wake(self) -> SandboxInfo:
        """Start it if it does not run. Any other call that needs it does that too."""
        return await self._ask(SandboxInfo, "POST", "/wake", timeout=None)

    async def sleep(self) -> SandboxInfo:
        """End its processes and keep its files, as after a long time without a call."""
        return await self._ask(SandboxInfo, "POST", "/sleep", timeout=None)

    async def destroy(self) -> None:
        """Remove every trace of it. Safe to repeat; the next call makes another, empty."""
        await self._transport.ask(type(None), "DELETE", self._root, timeout=None)
        self._found = False
        await self._channel.aclose()

    async def aclose(self) -> None:
        """Destroy it if `create` made it; others live by their id until they are destroyed.

        Its handlers that are functions of this process serve no more.
        """
        if self._ends:
            await self.destroy()
        await self._channel.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def made(self, info: SandboxInfo) -> None:
        """Know that it is there, made for this handle, whose end is its end."""
        self._cwd, self._found, self._ends = info.cwd, True, True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r} at {self._transport.address}>"
