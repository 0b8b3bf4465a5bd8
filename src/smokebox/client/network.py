"""What a sandbox may reach: changed while it runs, and looked at."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from smokebox.client.handle import Handle
from smokebox.client.handlers import HandlerChannel
from smokebox.client.resuming import resumed
from smokebox.egress.handler import CLIENT, check_handler
from smokebox.egress.layers import CATCH_ALL
from smokebox.egress.policy import Egress, handler_key
from smokebox.types import NetworkEvent
from smokebox.wire import answers
from smokebox.wire.codec import decode
from smokebox.wire.requests import ChangeEgress

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from smokebox.client.transport import Transport
    from smokebox.egress.handler import Handler, HandlerOption
    from smokebox.wire.requests import Settings


class Network(Handle):
    """The network of a sandbox. What is changed here outlives sleep and the server, and goes
    before the settings, also when those are sent again.

    Handlers that are functions run in this process, and only while this handle is there;
    without it, what they are for is refused.
    """

    def __init__(
        self,
        id: str,
        transport: Transport,
        settings: Settings,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        super().__init__(id, transport, settings)
        path = f"{self._root}/egress/handlers"
        self._channel = HandlerChannel(id, transport, path, handlers or {})
        weakref.finalize(self, self._channel.close).atexit = False

    async def get_egress(self) -> Egress:
        """The policy in force; `.decide("api.github.com")` tells what becomes of a host.

        Handlers are in it by name: `@client` is one that a client runs.
        """
        told = (await self._ask(answers.EgressInfo, "GET", "/egress")).in_force
        return Egress(**{name: getattr(told, name) for name in told.__struct_fields__})

    async def allow_host(self, host: str) -> None:
        """Open a host, by name or glob, and end a denial of that very name. Closes no other."""
        await self._change(ChangeEgress(allow=[host]))

    async def deny_host(self, host: str) -> None:
        """Close a host, by name or glob, whatever opened it."""
        await self._change(ChangeEgress(deny=[host]))

    async def remove_allowed_host(self, host: str) -> None:
        """Have no entry allow that very name, be it of the settings or of `allow_host`."""
        await self._change(ChangeEgress(remove_allowed=[host]))

    async def remove_denied_host(self, host: str) -> None:
        """Have no entry deny that very name, be it of the settings or of `deny_host`."""
        await self._change(ChangeEgress(remove_denied=[host]))

    async def set_internet(self, internet: bool | None) -> None:
        """Turn the internet on or off; None leaves that to the settings."""
        await self._change(ChangeEgress(internet=internet))

    async def set_outbound(self, handler: HandlerOption | None) -> None:
        """Have another handler for all hosts that have none of their own, or None for none."""
        if handler is not None:
            check_handler("outbound", handler)
        await self._set(CATCH_ALL, handler)

    async def set_outbound_by_host(self, host: str, handler: HandlerOption) -> None:
        """Have a handler for a host: a name, a glob, or `name:port`."""
        check_handler(f"outbound_by_host[{host!r}]", handler)
        await self._set(handler_key(host), handler)

    async def remove_outbound_by_host(self, host: str) -> None:
        """Have no handler for that very entry, be it of the settings or set at run time."""
        await self._set(handler_key(host), None)

    async def reset_egress(self) -> None:
        """Forget what was changed at run time: the settings hold again."""
        await self._ask(answers.EgressInfo, "DELETE", "/egress/changes", timeout=None)

    async def network_log(self, *, after: int = 0, limit: int = 100) -> list[NetworkEvent]:
        """What the sandbox asked of the network, the oldest first, and what became of it.

        `after` is the `cursor` of an earlier event. Does not wake the sandbox.
        """
        query = {"after": after, "limit": limit}
        return (await self._ask(answers.NetworkEvents, "GET", "/egress/log", query=query)).events

    async def follow_network_log(
        self, *, after: int | None = None
    ) -> AsyncGenerator[NetworkEvent, None]:
        """What the sandbox asks of the network, as it ends; from a cursor on if one is given.

        After a lost connection it goes on where it was.
        """
        events = resumed(self, "/egress/log/stream", {"cursor": after})
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == "request":
                    yield decode(NetworkEvent, event.data)

    @property
    def _ready(self) -> bool:
        return self._found and self._channel.ready

    async def _attach(self) -> None:
        if self._channel.handlers:
            await self._channel.open()

    async def _set(self, slot: str, handler: HandlerOption | None) -> None:
        handlers = self._channel.handlers
        before = handlers.get(slot)
        named: str | None = CLIENT
        if handler is None or isinstance(handler, str):
            named = handler
        else:
            # Before the policy names it: from then on it is asked for.
            handlers[slot] = handler
            await self._be_there()
            await self._channel.open()
        change = ChangeEgress(outbound_by_host={slot: named})
        if slot == CATCH_ALL:
            change = ChangeEgress(outbound=named)
        try:
            await self._change(change)
        except BaseException:
            if before is not None:
                handlers[slot] = before
            elif named == CLIENT:
                handlers.pop(slot, None)
            raise
        if named != CLIENT:
            handlers.pop(slot, None)

    async def _change(self, change: ChangeEgress) -> None:
        await self._ask(answers.EgressInfo, "POST", "/egress/changes", body=change, timeout=None)
