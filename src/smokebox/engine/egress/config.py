"""The network settings of a sandbox, and changes to them at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.egress.handler import (
    CATCH_ALL,
    CLIENT,
    HandlerOption,
    LocalHandlers,
    check_handler,
)
from smokebox.egress.layers import EgressChanges, EgressLayers, check_opened, split_handlers
from smokebox.egress.policy import handler_key, parse_egress
from smokebox.engine.egress.audit_log import FILE, AuditLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from smokebox.egress.policy import EgressInForce, EgressOption
    from smokebox.engine.egress.proxy import EgressProxy
    from smokebox.engine.record.rows import SandboxRow

    Amend = Callable[[Callable[[SandboxRow], SandboxRow]], Awaitable[None]]


class EgressConfig:
    """The network of one sandbox. Every change is stored, and applies from the next request on.

    Handlers that are functions live in this process: after a restart, requests that need one are
    refused until it is passed again.
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
        """Return the audit log, also of a sleeping sandbox."""
        if directory := await self._directory():
            self.proxy.audit_log.open(f"{directory}/{FILE}")
        return self.proxy.audit_log

    async def configure(self, egress: EgressOption) -> None:
        """Replace the policy; changes made at run time stay."""
        split = split_handlers(parse_egress(egress))
        self.serve(split.handlers)
        await self._change(lambda layers: layers.with_settings(split.settings, split.granted))

    async def allow_host(self, host: str) -> None:
        """Allow a host, and remove a denial of exactly this name."""

        def allow(layers: EgressLayers) -> EgressLayers:
            after = replace(layers, changes=layers.changes.allow(host))
            check_opened(after.egress(), host)
            return after

        await self._change(allow)

    async def deny_host(self, host: str) -> None:
        """Deny a host, even if something else allows it."""
        await self.change(lambda changes: changes.deny(host))

    async def remove_allowed_host(self, host: str) -> None:
        """Remove the entry of exactly this name from the allowed hosts."""
        await self.change(lambda changes: changes.remove_allowed(host))

    async def remove_denied_host(self, host: str) -> None:
        """Remove the entry of exactly this name from the denied hosts."""
        await self.change(lambda changes: changes.remove_denied(host))

    async def set_internet(self, internet: bool | None) -> None:
        """Turn the internet on or off; None leaves that to the settings."""
        await self.change(lambda changes: changes.set_internet(internet))

    async def set_outbound(self, handler: HandlerOption | None) -> None:
        """Set the handler for hosts without one of their own; None removes it."""
        await self._set_handler(CATCH_ALL, handler)

    async def set_outbound_by_host(self, host: str, handler: HandlerOption | None) -> None:
        """Set the handler of a host; None removes it."""
        await self._set_handler(handler_key(host), handler)

    async def change(self, change: Callable[[EgressChanges], EgressChanges]) -> None:
        """Make any change at run time."""
        await self._change(lambda layers: replace(layers, changes=change(layers.changes)))

    def serve(self, handlers: Mapping[str, HandlerOption]) -> None:
        """Run these functions of this process, by slot, where the policy says `@client`."""
        for slot, handler in handlers.items():
            if detach := self._detach.pop(slot, None):
                detach()
            self._detach[slot] = self.proxy.handlers.attach(LocalHandlers({slot: handler}))
        if handlers:
            self._keep()

    async def _set_handler(self, slot: str, handler: HandlerOption | None) -> None:
        name: str | None = handler if handler is None or isinstance(handler, str) else CLIENT
        if handler is not None:
            check_handler(slot or "outbound", handler)
        if callable(handler):
            self.serve({slot: handler})
        await self.change(lambda changes: changes.set_handler(slot, name))

    async def _change(self, change: Callable[[EgressLayers], EgressLayers]) -> None:
        await self._amend(lambda row: replace(row, egress=change(row.egress)))
