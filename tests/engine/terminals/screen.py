"""Somebody who looks at a terminal and types into it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.terminals.terminal import Terminal

PATIENCE = 10.0


class Screen:
    """All that a viewer has seen, and where the next look begins."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.seen = bytearray()
        self.looked = 0
        self.ended = False
        self.changed = asyncio.Event()

    async def type(self, text: str | bytes) -> None:
        await self.terminal.write(text)

    async def shows(self, text: str) -> str:
        """Wait for a text after those that were waited for, and give all up to its end."""
        async with asyncio.timeout(PATIENCE):
            while (at := self.seen.find(text.encode(), self.looked)) < 0:
                assert not self.ended, f"{text!r} never came: {bytes(self.seen[self.looked :])!r}"
                self.changed.clear()
                await self.changed.wait()
        begin, self.looked = self.looked, at + len(text.encode())
        return self.seen[begin : self.looked].decode(errors="replace")

    async def over(self) -> bytes:
        """Wait until there is no more, and give everything."""
        async with asyncio.timeout(PATIENCE):
            while not self.ended:
                self.changed.clear()
                await self.changed.wait()
        return bytes(self.seen)

    async def look(self) -> None:
        try:
            async with self.terminal.view() as view:
                async for data in view:
                    self.seen += data
                    self.changed.set()
        finally:
            self.ended = True
            self.changed.set()


@contextlib.asynccontextmanager
async def looking(terminal: Terminal) -> AsyncIterator[Screen]:
    """A screen that is looked at inside the block."""
    screen = Screen(terminal)
    task = asyncio.create_task(screen.look())
    try:
        yield screen
    finally:
        task.cancel()
        await asyncio.wait([task])


async def output_of(terminal: Terminal) -> bytes:
    """All that a terminal gives a viewer who comes at this moment, to its end."""
    async with asyncio.timeout(PATIENCE), terminal.view() as view:
        return b"".join([data async for data in view])
