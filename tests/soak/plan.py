"""Setup of a soak test that its programs share, and the phases that they are told of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Name of the local server that sandboxes may reach.
ORIGIN = "origin.test"

PhaseKind = Literal["quiet", "hostile", "settle", "down"]


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's key, and the ids of its sandboxes."""

    key: str
    prefix: str
    sandboxes: tuple[str, ...]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a program of the load needs to know.

    `rate` is the number of operations that it begins each second, and `attacks` are the names of
    those that it runs.
    """

    url: str
    origin: int
    tenants: tuple[Tenant, ...]
    rate: float = 0.0
    seed: int = 0
    attacks: tuple[str, ...] = ()

    @property
    def address(self) -> tuple[str, int]:
        """Address of the server."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)


class Phases:
    """The phase of the run, by lines `KIND NUMBER` of the standard input.

    `outages` counts how often the server was stopped, so that an operation can tell whether it
    ran into one.
    """

    def __init__(self) -> None:
        self.kind: PhaseKind = "settle"
        self.number = 0
        self.outages = 0
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Follow the phases until the input ends."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().split():
            async with self._changed:
                self.kind, self.number = line[0], int(line[1])  # type: ignore[assignment]
                self.outages += self.kind == "down"
                self._changed.notify_all()

    async def wait_until(self, *, down: bool) -> None:
        """Wait until the server is stopped, or runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: (self.kind == "down") is down)

    async def wait_for(self, *, hostile: bool) -> None:
        """Wait until the attacks run, or do not."""
        async with self._changed:
            await self._changed.wait_for(lambda: (self.kind == "hostile") is hostile)


def report(value: object) -> None:
    """Print one line of JSON for the process that started this one."""
    os.write(1, msgspec.json.encode(value) + b"\n")


@contextlib.asynccontextmanager
async def owned(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel tasks at the end of the block, and wait for them."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
