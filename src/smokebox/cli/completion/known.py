"""Names that only the server knows. One that does not run, or is slow, knows none."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from smokebox.client.background import find
from smokebox.client.client import URL, Client, connect
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

# Somebody waits with a finger on the key.
_SECONDS = 1.0


def sandboxes() -> dict[str, str]:
    """What each sandbox is at, by id."""

    async def ask(client: Client) -> dict[str, str]:
        return {info.id: info.status for info in await client.list()}

    return _known(ask)


def processes(id: str) -> dict[str, str]:
    """The command of each process of a sandbox, by id."""

    async def ask(client: Client) -> dict[str, str]:
        sandbox = client.sandbox(id)
        if await sandbox.info() is None:
            return {}
        return {process.id: process.command for process in await sandbox.list_processes()}

    return _known(ask)


def _known(ask: Callable[[Client], Coroutine[Any, Any, dict[str, str]]]) -> dict[str, str]:
    if URL not in os.environ and find() is None:
        # A client would start it.
        return {}

    async def whole() -> dict[str, str]:
        async with asyncio.timeout(_SECONDS), connect() as client:
            return await ask(client)

    try:
        return asyncio.run(whole())
    except (SmokeboxError, OSError):
        return {}
