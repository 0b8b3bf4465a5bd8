"""The end of a server: what it does is finished, or told that it is not, before it goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from smokebox.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# How long those that were broken off have to say so to their callers.
_LAST_WORDS = 2.0
# When a caller may find the next server.
_RETRY_AFTER = 2.0


class Drain:
    """Which requests a server is at, and how it ends.

    Once `asked`, new requests are refused. Those that it is at have a while; then they are
    cancelled, which `cut` tells from a caller who left. With `keep` the sandboxes run on, for
    the next server: so a restart or an upgrade does not end anybody's processes.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.keep = False
        self.cut = False
        self.last_request = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting = 0
        self._changed = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self.asked.is_set()

    @property
    def requests(self) -> int:
        """How many requests are being answered."""
        return len(self._tasks)

    def ask(self, *, keep: bool) -> None:
        """Have the server end. Who asks first decides about the sandboxes."""
        if not self.begun:
            self.keep = keep
            self.asked.set()

    def hurry(self) -> None:
        """Give what is still being done no more time."""
        self.cut = True
        self._changed.set()

    def enter(self, task: asyncio.Task[None]) -> None:
        """A request has come, and is answered by this task."""
        self._tasks.add(task)

    def leave(self, task: asyncio.Task[None]) -> None:
        """It was answered."""
        self._tasks.discard(task)
        self.last_request = time.monotonic()
        if self.begun:
            self._changed.set()

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """A request that lasts for as long as its caller likes: no end waits for it."""
        self._lasting += 1
        try:
            yield
        finally:
            self._lasting -= 1

    async def finish(self, seconds: float) -> None:
        """Wait for the requests that there are, and break off those that take longer."""
        await self._none_left(seconds)
        self.cut = True
        for task in self._tasks:
            task.cancel()
        await _ended(self._tasks.copy())

    def refusal(self) -> ServiceUnavailable:
        """The error for a request that is not begun any more, or broken off."""
        return ServiceUnavailable(
            "the server is about to stop.",
            hint="Ask again in a moment: the next one has the same sandboxes.",
            service="server",
            reason="draining",
            retry_after=_RETRY_AFTER,
        )

    async def _none_left(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while len(self._tasks) > self._lasting and not self.cut:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=_LAST_WORDS)
