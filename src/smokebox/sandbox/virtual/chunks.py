"""Output on its way from the thread that makes it to whoever reads the stream."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.types import OutputChunk


class Chunks:
    """A queue of chunks from any thread to the event loop it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[OutputChunk] = deque()
        self._news = asyncio.Event()
        self._told = False
        self._ended = False

    def put(self, chunk: OutputChunk) -> None:
        """Add a chunk, from any thread."""
        self._items.append(chunk)
        # A script that prints a million lines need not wake the loop a million times.
        if not self._told:
            self._told = True
            # A script that was left behind may outlive the loop.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell)

    def end(self) -> None:
        """There are no more chunks than those that are here; from the loop's thread."""
        self._ended = True
        self._news.set()

    def left(self) -> list[OutputChunk]:
        """What nobody has read."""
        items = list(self._items)
        self._items.clear()
        return items

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        while True:
            while self._items:
                yield self._items.popleft()
            if self._ended:
                return
            await self._news.wait()
            self._news.clear()

    def _tell(self) -> None:
        self._told = False
        self._news.set()
