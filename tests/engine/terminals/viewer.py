"""A viewer of a terminal for tests, which sends input and waits for output."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.terminals.terminal import Terminal

TIMEOUT = 10.0


class Viewer:
    """All output that a viewer has received, and the position of the next `expect`."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.output = bytearray()
        self.position = 0
        self.ended = False
        self.changed = asyncio.Event()

    async def send(self, text: str | bytes) -> None:
        await self.terminal.write(text)

    async def expect(self, text: str) -> str:
        """Wait for a text after the last expected one, and return the output up to its end."""
        async with asyncio.timeout(TIMEOUT):
            while (at := self.output.find(text.encode(), self.position)) < 0:
                assert not self.ended, f"{text!r} is not in {bytes(self.output[self.position :])!r}"
                self.changed.clear()
                await self.changed.wait()
        start, self.position = self.position, at + len(text.encode())
        return self.output[start : self.position].decode(errors="replace")

    async def read_all(self) -> bytes:
        """Wait for the end of the output, and return all of it."""
        async with asyncio.timeout(TIMEOUT):
            while not self.ended:
                self.changed.clear()
                await self.changed.wait()
        return bytes(self.output)

    async def follow(self) -> None:
        try:
            async with self.terminal.view() as view:
                async for data in view:
                    self.output += data
                    self.changed.set()
        finally:
            self.ended = True
            self.changed.set()


@contextlib.asynccontextmanager
async def open_viewer(terminal: Terminal) -> AsyncIterator[Viewer]:
    """View a terminal inside the block."""
    viewer = Viewer(terminal)
    task = asyncio.create_task(viewer.follow())
    try:
        yield viewer
    finally:
        task.cancel()
        await asyncio.wait([task])


async def output_of(terminal: Terminal) -> bytes:
    """Return the output of a terminal for a viewer that starts now, until its end."""
    async with asyncio.timeout(TIMEOUT), terminal.view() as view:
        return b"".join([data async for data in view])
