"""Running requests and streams by the key that allowed them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from smokebox.errors import Unauthorized


class Stoppable(Protocol):
    """A request or stream that can be ended."""

    def cut(self) -> None:
        """End at once: its key was revoked."""


class RunningRequests:
    """Running requests by key, so that revoking a key ends them."""

    def __init__(self) -> None:
        self._running: dict[str, set[Stoppable]] = {}

    def add(self, key: str, request: Stoppable) -> None:
        """Add a request that begins."""
        self._running.setdefault(key, set()).add(request)

    def remove(self, key: str, request: Stoppable) -> None:
        """Remove a request that ended."""
        others = self._running[key]
        others.discard(request)
        if not others:
            del self._running[key]

    def cut(self, key: str) -> None:
        """End all requests of a key, except the one that revokes it."""
        for request in list(self._running.get(key, ())):
            request.cut()


class RunningRequest:
    """A request to the API, cancelled when its key is revoked."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.was_cut = False
        self._task = task

    def cut(self) -> None:
        """Cancel the request, unless it is the one that revokes the key."""
        if self._task is not asyncio.current_task():
            self.was_cut = True
            self._task.cancel()


def revoked() -> Unauthorized:
    """Return the error for a request whose key was revoked meanwhile."""
    return Unauthorized(
        "the key of this request was revoked.",
        hint="Create another with `smokebox keys create`, or get one from the operator.",
        reason="revoked",
    )
