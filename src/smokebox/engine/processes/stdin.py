"""The engine's end of a lasting process's stdin: a pipe with a name.

The minder holds a writing end too, so that the death of the engine is no end of file, and
another engine opens the pipe by its name. Once stdin is closed, the name is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from smokebox.errors import Unsupported
from smokebox.sandbox.text import encode_option

if TYPE_CHECKING:
    from collections.abc import Callable


class Stdin:
    """Writes without ever blocking the event loop, one write after the other."""

    def __init__(self, path: str, process: str) -> None:
        self._path = path
        self._process = process
        self._fd: int | None = None
        self._turn = asyncio.Lock()

    async def write(self, data: str | bytes, over: asyncio.Event) -> bool:
        """Write all of it; False when the process has ended before it was taken."""
        left = memoryview(encode_option("data", data))
        async with self._turn:
            while left and not over.is_set():
                try:
                    fd = self._open()
                    left = left[os.write(fd, left) :]
                except BlockingIOError:
                    await _writable(fd, over)
                except BrokenPipeError:
                    if not over.is_set():
                        await self._not_read(over)
        if over.is_set():
            self.let_go()
        return not left

    async def close(self) -> None:
        """Let nobody write any more, in this engine or another."""
        async with self._turn:
            self._close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def let_go(self) -> None:
        """Close our end, unless somebody waits to write; the process does not notice."""
        if not self._turn.locked():
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise self._closed("was closed") from None
            except OSError as error:
                # ENXIO: a pipe that nobody has open for reading.
                raise BrokenPipeError(error.errno, "nobody reads") from None
        return self._fd

    async def _not_read(self, over: asyncio.Event) -> None:
        """Nobody has the other end: either the process ends, or it has closed its stdin."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await over.wait()
                return
        raise self._closed("is not read any more: the process has closed it")

    def _closed(self, how: str) -> Unsupported:
        return Unsupported(
            f"the stdin of process {self._process} {how}.",
            hint="Start another process to write to.",
            operation="write_stdin",
        )


async def _writable(fd: int, over: asyncio.Event) -> None:
    """Wait until a pipe takes more, or the process is over."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    waiting = [asyncio.ensure_future(event.wait()) for event in (ready, over)]
    stop: Callable[[int], bool] = loop.remove_writer
    loop.add_writer(fd, ready.set)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop(fd)
        for one in waiting:
            one.cancel()
