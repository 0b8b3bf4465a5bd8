"""The timer that destroys sandboxes whose lifetime is over, awake or asleep.

The record has the lifetimes, so they also hold for sandboxes that no handle refers to, and across
restarts.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from typing import TYPE_CHECKING

from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# The wall clock may be set while the timer sleeps.
CLOCK_SECONDS = 30.0
# Until a destruction that failed is tried again.
RETRY_SECONDS = 10.0
_AT_ONCE = 8

_log = logging.getLogger("smokebox.engine")


class Expirations:
    """Times at which sandboxes expire, by id."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        # Has an entry for each time that was ever set; `_times` tells which of them hold.
        self._queue: list[tuple[float, str]] = []
        self._changed = asyncio.Event()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def set(self, id: str, at: float | None) -> None:
        """Set the time at which a sandbox expires, in seconds since the epoch; None for never."""
        if self._times.get(id) == at:
            return
        self._times.pop(id, None)
        if at is not None:
            self._times[id] = at
            heapq.heappush(self._queue, (at, id))
            if self._queue[0] == (at, id):
                self._changed.set()

    def start(self, expire: Callable[[str], Awaitable[None]]) -> None:
        """Start the timer, which calls `expire` with the id of each sandbox at its time."""
        self._keep(self._run(expire))

    async def aclose(self) -> None:
        """Stop the timer."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, expire: Callable[[str], Awaitable[None]]) -> None:
        while True:
            self._changed.clear()
            while self._queue and self._queue[0][0] <= time.time():
                at, id = heapq.heappop(self._queue)
                if self._times.get(id) == at:
                    del self._times[id]
                    self._keep(self._expire(id, expire))
            left = self._queue[0][0] - time.time() if self._queue else CLOCK_SECONDS
            try:
                async with asyncio.timeout(min(max(left, 0.0), CLOCK_SECONDS)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _expire(self, id: str, expire: Callable[[str], Awaitable[None]]) -> None:
        async with self._turns:
            try:
                await expire(id)
            except (SmokeboxError, OSError) as error:
                _log.warning("sandbox %s expired and could not be destroyed: %s", id, error)
                self.set(id, time.time() + RETRY_SECONDS)

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
