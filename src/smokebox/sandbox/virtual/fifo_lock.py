"""Who runs next: one script at a time in a sandbox, first come first served."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress


class FifoLock:
    """A lock that callers from any event loop queue for in order.

    `asyncio.Lock` belongs to the first loop that waited for it, and a sandbox outlives loops.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            called = asyncio.get_running_loop().create_future()
            self._queue.append(called)
        try:
            await called
        except asyncio.CancelledError:
            with self._guard:
                waiting = called in self._queue
                if waiting:
                    self._queue.remove(called)
            if not waiting:
                # It was called and leaves all the same.
                self._call_next()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._call_next()

    def _call_next(self) -> None:
        with self._guard:
            while self._queue:
                called = self._queue.popleft()
                # A loop that was closed has nobody waiting in it.
                with suppress(RuntimeError):
                    called.get_loop().call_soon_threadsafe(_call, called)
                    return
            self._taken = False


def _call(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
