"""Awaiting coroutines: to their end despite cancellation, or until the first of several ends."""

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


async def run_until_first(*work: Coroutine[Any, Any, object]) -> None:
    """Run coroutines until one of them ends, cancel the others, and raise the error of any."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
