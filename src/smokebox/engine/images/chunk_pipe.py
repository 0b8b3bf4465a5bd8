"""A bounded queue of bytes from an event loop to a thread."""

from __future__ import annotations

import asyncio
import contextlib
from queue import SimpleQueue
from typing import TYPE_CHECKING

from smokebox.engine.workers import JobStopped

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterator

_CHUNK = 1 << 20
_MOST_CHUNKS = 8


class ChunkPipe:
    """Chunks that the event loop adds and one thread reads. Created on that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(_MOST_CHUNKS)
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()

    async def fill(self, chunks: AsyncIterable[bytes]) -> None:
        """Add all chunks, as the thread takes them, and the end."""
        async for chunk in chunks:
            for start in range(0, len(chunk), _CHUNK):
                await self._room.acquire()
                self._queue.put(chunk[start : start + _CHUNK])
        self._queue.put(b"")

    def stop(self) -> None:
        """Make the thread stop at its next read."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the chunks in the thread. Raises `JobStopped` after `stop`."""
        while chunk := self._queue.get():
            # The loop may be closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._room.release)
            yield chunk
        if chunk is None:
            raise JobStopped
