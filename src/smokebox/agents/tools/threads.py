"""Runs a blocking function in a thread of its own, and stops waiting when cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises.

    The thread is a daemon outside of any pool: one that never ends takes no room from
    others and does not keep the program from ending.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value: T | None = None
        failed: BaseException | None = None
        try:
            value = context.run(function)
        except StopIteration as error:
            # A future refuses this one, which would end whatever iterates outside.
            failed = RuntimeError(f"the function raised {error!r}")
            failed.__cause__ = error
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, name="smokebox-tool", daemon=True).start()
    return await answer
