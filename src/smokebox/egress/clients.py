"""Handlers that are only named in a policy: who runs them at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from smokebox.egress.handler import CLIENT, HandlerContext, HandlerOption, Refused, run_handler
from smokebox.egress.layers import CATCH_ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from smokebox.egress.message import Request, Response


class HandlerRunner(Protocol):
    """Somebody who runs handlers, by slot: a client that is connected, or this process."""

    @property
    def slots(self) -> Collection[str]:
        """Which slots it has a handler for."""
        ...

    async def handle(
        self, slot: str, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Run the handler of a slot."""
        ...


class LocalHandlers:
    """Handlers of this process."""

    def __init__(self, handlers: Mapping[str, HandlerOption]) -> None:
        self._handlers = {slot: one for slot, one in handlers.items() if callable(one)}

    @property
    def slots(self) -> Collection[str]:
        """Which slots it has a handler for."""
        return self._handlers.keys()

    async def handle(
        self, slot: str, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Run the handler of a slot."""
        return await run_handler(self._handlers[slot], request, env, context)


class Clients:
    """The sources of one sandbox; of those that have a slot, the latest serves it."""

    def __init__(self) -> None:
        self._sources: list[HandlerRunner] = []

    @property
    def slots(self) -> set[str]:
        """The slots that somebody serves."""
        return {slot for source in self._sources for slot in source.slots}

    def attach(self, source: HandlerRunner) -> Callable[[], None]:
        """Have a source serve from here on; what is returned ends that, and may be repeated."""
        self._sources.append(source)

        def detach() -> None:
            if source in self._sources:
                self._sources.remove(source)

        return detach

    def bind(self, slot: str, handler: HandlerOption) -> HandlerOption:
        """What stands for a handler in the policy in force: see `EgressLayers.egress`."""
        return ClientHandler(self, slot) if handler == CLIENT else handler

    def serving(self, slot: str) -> HandlerRunner:
        """Who serves a slot. Raises `Refused` where nobody does."""
        for source in reversed(self._sources):
            if slot in source.slots:
                return source
        entry = "outbound" if slot == CATCH_ALL else f"outbound_by_host[{slot!r}]"
        raise Refused(f"the handler {entry} runs in the process of a client, and none is connected")


class ClientHandler:
    """A `Handler` that is run by whoever serves its slot when a request comes."""

    def __init__(self, clients: Clients, slot: str) -> None:
        self._clients = clients
        self._slot = slot
        self.__name__ = self.__qualname__ = CLIENT

    async def __call__(
        self, request: Request, env: Any, context: HandlerContext
    ) -> Request | Response:
        """Run it there."""
        return await self._clients.serving(self._slot).handle(self._slot, request, env, context)
