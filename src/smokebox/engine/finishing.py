"""Work that goes on to its end, whoever stops waiting for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def to_its_end(work: Coroutine[None, None, None]) -> None:
    """Wait for something, also when cancelled, and be cancelled then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Looked at, so that nobody is told that nobody did.
        task.exception()
        raise cancelled
    task.result()
