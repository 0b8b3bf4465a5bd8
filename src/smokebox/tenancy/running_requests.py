"""Running requests and streams by the key that allowed them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

from smokebox.errors import SmokeboxError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.tenancy.keys import Keys

# Interval at which keys that expired or that another process revoked are noticed.
_CHECK_SECONDS = 0.25


class Stoppable(Protocol):
    """A request or stream that can be ended."""

    def cut(self, error: Unauthorized) -> None:
        """End at once: its key has ended."""


class RunningRequests:
    """Running requests by key, so that they end when their key does."""

    def __init__(self) -> None:
        self._running: dict[str, set[Stoppable]] = {}
        self._began = asyncio.Event()

    @contextlib.contextmanager
    def hold(self, key: str, request: Stoppable) -> Iterator[None]:
        """Count a request as running for the duration of the block."""
        self.add(key, request)
        try:
            yield
        finally:
            self.remove(key, request)

    def add(self, key: str, request: Stoppable) -> None:
        """Add a request that begins."""
        self._running.setdefault(key, set()).add(request)
        self._began.set()

    def remove(self, key: str, request: Stoppable) -> None:
        """Remove a request that ended."""
        others = self._running[key]
        others.discard(request)
        if not others:
            del self._running[key]

    def cut_ended(self, keys: Keys) -> None:
        """End all requests whose key has expired or was revoked."""
        for key, requests in list(self._running.items()):
            if (error := keys.ended(key)) is not None:
                for request in list(requests):
                    request.cut(error)

    @contextlib.asynccontextmanager
    async def watch(self, keys: Keys) -> AsyncIterator[None]:
        """End requests at the time when their key ends, for the duration of the block."""
        task = asyncio.create_task(self._watch(keys))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self, keys: Keys) -> None:
        while True:
            await self._began.wait()
            # A file that cannot be read refuses every new request, which says why.
            with contextlib.suppress(SmokeboxError):
                keys.refresh()
            self.cut_ended(keys)
            if not self._running:
                self._began.clear()
            await asyncio.sleep(_CHECK_SECONDS)


class RunningRequest:
    """A request that is served by a task, which is cancelled when its key ends.

    `ended_by` is the error for its sender then.
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.ended_by: Unauthorized | None = None
        self._task = task

    def cut(self, error: Unauthorized) -> None:
        """Cancel the request, unless it is the one that revokes the key."""
        if self._task is not asyncio.current_task() and self.ended_by is None:
            self.ended_by = error
            self._task.cancel()
