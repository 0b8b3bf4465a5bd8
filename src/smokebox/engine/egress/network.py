"""What a sandbox may reach, as its owner says it: settings, and changes at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.egress.clients import Local
from smokebox.egress.handler import CLIENT, HandlerOption, check_handler
from smokebox.egress.layers import (
    CATCH_ALL,
    SETTINGS,
    Changes,
    Layers,
    check_opened,
    split_handlers,
)
from smokebox.egress.policy import Egress, handler_key
from smokebox.engine.egress.journal import FILE, Journal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from smokebox.engine.egress.door import Door
    from smokebox.engine.record.rows import SandboxRow

    Amend = Callable[[Callable[[SandboxRow], SandboxRow]], Awaitable[None]]


class Network:
    """The network of one sandbox. Every change is kept, and holds from the next request on.

    Handlers that are functions live in this process: after a restart what they are for is
    refused until they are given again.
    """

    def __init__(
        self,
        door: Door,
        amend: Amend,
        *,
        keep: Callable[[], None],
        directory: Callable[[], Awaitable[str]],
    ) -> None:
        self.door = door
        self._amend = amend
        self._directory = directory
        self._keep = keep
        self._detach: dict[str, Callable[[], None]] = {}

    @property
    def policy(self) -> Egress:
        """The policy in force."""
        return self.door.policy

    async def journal(self) -> Journal:
        """The audit log, also of a sandbox that sleeps."""
        if directory := await self._directory():
            self.door.journal.place(f"{directory}/{FILE}")
        return self.door.journal

    async def configure(self, settings: Egress | Mapping[str, object]) -> None:
        """Have other settings; changes at run time stay. Of a mapping only what it has."""
        split = split_handlers(as_settings(settings))
        self.serve(split.handlers)
        await self._change(lambda layers: layers.with_settings(split.settings))

    async def allow_host(self, host: str) -> None:
        """Open a host, and end a denial of that very name."""
        await self._with(lambda changes: changes.allow(host), opened=host)

    async def deny_host(self, host: str) -> None:
        """Close a host, whatever opened it."""
        await self._with(lambda changes: changes.deny(host))

    async def remove_allowed_host(self, host: str) -> None:
        """Have no entry allow that very name."""
        await self._with(lambda changes: changes.remove_allowed(host))

    async def remove_denied_host(self, host: str) -> None:
        """Have no entry deny that very name."""
        await self._with(lambda changes: changes.remove_denied(host))

    async def set_internet(self, internet: bool | None) -> None:
        """Turn the internet on or off; None leaves that to the settings."""
        await self._with(lambda changes: changes.set_internet(internet))

    async def set_outbound(self, handler: HandlerOption | None) -> None:
        """Have another handler for all that has none of its own, or none."""
        await self._set(CATCH_ALL, handler)

    async def set_outbound_by_host(self, host: str, handler: HandlerOption | None) -> None:
        """Have another handler for a host, or none."""
        await self._set(handler_key(host), handler)

    async def change(self, change: Callable[[Changes], Changes]) -> None:
        """Any other change at run time."""
        await self._with(change)

    def serve(self, handlers: Mapping[str, HandlerOption]) -> None:
        """Run these functions of this process, by slot, where the policy says `@client`."""
        for slot, handler in handlers.items():
            if detach := self._detach.pop(slot, None):
                detach()
            self._detach[slot] = self.door.clients.attach(Local({slot: handler}))
        if handlers:
            self._keep()

    async def _set(self, slot: str, handler: HandlerOption | None) -> None:
        named: str | None = handler if handler is None or isinstance(handler, str) else CLIENT
        if handler is not None:
            check_handler(slot or "outbound", handler)
        if callable(handler):
            self.serve({slot: handler})
        await self._with(lambda changes: changes.set_handler(slot, named))

    async def _with(self, change: Callable[[Changes], Changes], *, opened: str = "") -> None:
        def changed(layers: Layers) -> Layers:
            after = replace(layers, changes=change(layers.changes))
            if opened:
                check_opened(after.egress(), opened)
            return after

        await self._change(changed)

    async def _change(self, change: Callable[[Layers], Layers]) -> None:
        await self._amend(lambda row: replace(row, egress=change(row.egress)))


def as_settings(given: Egress | Mapping[str, object]) -> Mapping[str, object]:
    """Settings by name; of a policy all of them."""
    if isinstance(given, Egress):
        return {name: getattr(given, name) for name in SETTINGS}
    return given
