"""Threads for blocking work on files, whose cancelling stops the work and waits for it."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from smokebox.engine.credentials import own_umask

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 16
# How long a cancelled call waits for work that hangs in the kernel.
PATIENCE = 5.0


class Stopped(Exception):
    """Raised at a checkpoint of work that shall end."""


class Job:
    """One piece of work, which `stop` ends at its next checkpoint."""

    __slots__ = ("_stopped",)

    def __init__(self) -> None:
        self._stopped = False

    def stop(self) -> None:
        """End it. Safe from any thread."""
        self._stopped = True

    def check(self) -> None:
        """Raise `Stopped`, but once only: what cleans up after it is not stopped again."""
        if self._stopped:
            self._stopped = False
            raise Stopped


class _Thread(threading.local):
    job: Job | None = None


_thread = _Thread()


def checkpoint() -> None:
    """Let long work end here if its call was cancelled. Does nothing in other threads."""
    job = _thread.job
    if job is not None:
        job.check()


class Workers:
    """A pool of threads with a file mode mask of their own, apart from the loop's default."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="smokebox-files", initializer=own_umask
        )

    async def run(self, job: Job, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work` in a thread.

        Cancelling stops it at its next checkpoint and waits for that, so that nothing of
        it happens after the call has ended.
        """
        queued = self._pool.submit(_work, job, functools.partial(work, *args, **kwargs))
        future = asyncio.wrap_future(queued)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not queued.cancel():
                job.stop()
                await _settled(future)
            raise

    async def finish(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work` in a thread, and let no cancelling come between."""
        queued = self._pool.submit(_work, Job(), functools.partial(work, *args, **kwargs))
        future = asyncio.wrap_future(queued)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            raise

    def close(self) -> None:
        """Let the threads end when they are done. Safe to repeat."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _work(job: Job, call: Callable[[], R]) -> R:
    _thread.job = job
    try:
        return call()
    finally:
        _thread.job = None


async def _settled(future: asyncio.Future[R]) -> None:
    # What it raises from here on is of no interest to anybody.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while not future.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait([future], timeout=left)
        except asyncio.CancelledError:
            continue
