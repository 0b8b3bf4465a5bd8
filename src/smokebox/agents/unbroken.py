"""Awaiting what must not be torn: cancelling waits for its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end also while being cancelled, and be cancelled then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            # Looked at, so that nobody is told of an error that was never retrieved.
            task.exception()
        raise
