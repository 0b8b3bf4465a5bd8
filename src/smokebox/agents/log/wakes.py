"""Tells those who follow a session in this process that there may be more."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class Wakes:
    """Events of followers, which may be of several event loops; set from any thread."""

    def __init__(self) -> None:
        self._events: dict[Hashable, dict[asyncio.Event, asyncio.AbstractEventLoop]] = {}

    @contextlib.contextmanager
    def listen(self, key: Hashable) -> Iterator[asyncio.Event]:
        """An event that is set whenever something happens to the session."""
        event = asyncio.Event()
        self._events.setdefault(key, {})[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            listeners = self._events[key]
            del listeners[event]
            if not listeners:
                del self._events[key]

    def wake(self, key: Hashable) -> None:
        """Something happened to a session."""
        for event, loop in list(self._events.get(key, {}).items()):
            # The loop may be gone, and with it whoever listened.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    def wake_all(self) -> None:
        """Something may have happened to any of them."""
        for key in list(self._events):
            self.wake(key)
