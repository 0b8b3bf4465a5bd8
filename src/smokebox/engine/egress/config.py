"""What a sandbox may reach, as its owner says it: settings, and changes at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.egress.clients import LocalHandlers
from smokebox.egress.handler import CLIENT, HandlerOption, check_handler
from smokebox.egress.layers import (
    CATCH_ALL,
    EgressChanges,
    EgressLayers,
    check_opened,
    split_handlers,
)
from smokebox.egress.policy import handler_key, parse_egress
from smokebox.engine.egress.audit_log import FILE, AuditLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from smokebox.egress.policy import EgressInForce, EgressOption
    from smokebox.engine.egress.proxy import EgressProxy
    from smokebox.engine.record.rows import SandboxRow

    Amend = Callable[[Callable[[SandboxRow], SandboxRow]], Awaitable[None]]


class EgressConfig:
    """The network of one sandbox. Every change is kept, and holds from the next request on.

    HandlerResolver that are functions live in this process: after a restart what they are for is
    refused until they are given again.
    """

    def __init__(
        self,
        proxy: EgressProxy,
        amend: Amend,
        *,
        keep: Callable[[], None],
        directory: Callable[[], Awaitable[str]],
    ) -> None:
        self.proxy = proxy
        self._amend = amend
        self._directory = directory
        self._keep = keep
        self._detach: dict[str, Callable[[], None]] = {}

    @property
    def policy(self) -> EgressInForce:
        """The policy in force."""
        return self.proxy.policy

    async def audit_log(self) -> AuditLog:
        """The audit log, also of a sandbox that sleeps."""
        if directory := await self._directory():
            self.proxy.audit_log.place(f"{directory}/{FILE}")
        return self.proxy.audit_log

    async def configure(self, egress: EgressOption) -> None:
        """Replace the policy; changes made at run time stay."""
        split = split_handlers(parse_egress(egress))
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

    async def change(self, change: Callable[[EgressChanges], EgressChanges]) -> None:
        """Any other change at run time."""
        await self._with(change)

    def serve(self, handlers: Mapping[str, HandlerOption]) -> None:
        """Run these functions of this process, by slot, where the policy says `@client`."""
        for slot, handler in handlers.items():
            if detach := self._detach.pop(slot, None):
                detach()
            self._detach[slot] = self.proxy.clients.attach(LocalHandlers({slot: handler}))
        if handlers:
            self._keep()

    async def _set(self, slot: str, handler: HandlerOption | None) -> None:
        named: str | None = handler if handler is None or isinstance(handler, str) else CLIENT
        if handler is not None:
            check_handler(slot or "outbound", handler)
        if callable(handler):
            self.serve({slot: handler})
        await self._with(lambda changes: changes.set_handler(slot, named))

    async def _with(
        self, change: Callable[[EgressChanges], EgressChanges], *, opened: str = ""
    ) -> None:
        def changed(layers: EgressLayers) -> EgressLayers:
            after = replace(layers, changes=change(layers.changes))
            if opened:
                check_opened(after.egress(), opened)
            return after

        await self._change(changed)

    async def _change(self, change: Callable[[EgressLayers], EgressLayers]) -> None:
        await self._amend(lambda row: replace(row, egress=change(row.egress)))
