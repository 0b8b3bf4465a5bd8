"""How far a backup or a restore is, while the server is at it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from smokebox.cli.remote.progress import progress
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from smokebox.client.sandbox import Sandbox

T = TypeVar("T")

_POLL = 0.25


async def watched(sandbox: Sandbox, name: str, work: Coroutine[Any, Any, T]) -> T:
    """What some work gives, with a line in the terminal for how far it is."""
    with progress(name) as told:
        if told is None:
            return await work
        task = asyncio.create_task(work)
        looking = asyncio.create_task(_look(sandbox, told))
        try:
            return await task
        finally:
            for one in (task, looking):
                one.cancel()
            await asyncio.wait((task, looking))


async def _look(sandbox: Sandbox, told: Callable[[int, int | None], None]) -> None:
    while True:
        await asyncio.sleep(_POLL)
        # What the work itself meets is for that to tell.
        with contextlib.suppress(SmokeboxError):
            if await sandbox.info() is None:
                continue
            for one in await sandbox.backup_progress():
                if one.begun:
                    told(one.bytes, one.total)
