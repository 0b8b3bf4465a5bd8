"""Awaiting work that cancellation must not interrupt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even when cancelled, and raise `CancelledError` after that.

    When cancelled, the result of `work` and its exception are dropped.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        # Otherwise asyncio logs that the exception was never retrieved.
        task.exception()
    raise cancelled
