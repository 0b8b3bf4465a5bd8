"""Threads with a stack deep enough for any script, shared by all virtual sandboxes."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from smokebox.sandbox.stack import MIN_STACK_SIZE, stack_size

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Most work takes microseconds, less than it takes to wake an event loop: wait that long.
QUICK = 0.0002
IDLE_SECONDS = 20.0
EXIT_GRACE = 2.0


class Job(Generic[T]):
    """A function on its way through one of the threads, awaited from an event loop."""

    def __init__(self, work: Callable[[], T], cancel: Callable[[], None] | None = None) -> None:
        self._work = work
        self._cancel = cancel
        self._running = threading.Lock()
        self._running.acquire()
        self._wake: Callable[[], None] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Do the work, here and now."""
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Tell who waits that the work is done."""
        self.done = True
        self._running.release()
        if self._wake is not None:
            self._wake()

    def cancel(self) -> None:
        """Ask the work to end early, where it knows how."""
        if self._cancel is not None:
            self._cancel()

    def join(self, seconds: float) -> bool:
        """Block for so long at most; true when the work is done."""
        if self._running.acquire(timeout=seconds):
            self._running.release()
        return self.done

    async def wait(self, seconds: float | None = None) -> bool:
        """Let the event loop go on meanwhile; true when the work is done in time."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def wake() -> None:
            # The loop may have closed under a caller that was cancelled.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ended)

        self._wake = wake
        # The work may have ended before it could see who to wake.
        if self.done:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ended
        return self.done

    def result(self) -> T:
        """What the work returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def run(work: Callable[[], T]) -> T:
    """Do something that blocks on one of the threads, and give what it returns."""
    job = Job(work)
    start(job)
    if not job.join(QUICK):
        await job.wait()
    return job.result()


def start(job: Job[T]) -> None:
    """Hand a job to an idle thread, or to one made for it."""
    with _lock:
        thread = _idle.pop() if _idle else None
        _busy.add(job)
    if thread is None:
        try:
            thread = _started()
        except BaseException:
            _busy.discard(job)
            raise
    thread.jobs.put(job)


def _started() -> _Thread:
    """A thread with a deep stack, already waiting for jobs."""
    size = stack_size()
    while True:
        thread = _Thread()
        try:
            with _stack_size_lock:
                before = threading.stack_size(size)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
            return thread
        except RuntimeError:
            # Little address space is left (`ulimit -v`): a smaller stack serves most scripts.
            if size <= MIN_STACK_SIZE:
                raise
            size //= 4


class _Thread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="smokebox-shell", daemon=True)
        self.jobs: SimpleQueue[Job[Any]] = SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=IDLE_SECONDS)
            except Empty:
                if self._retire():
                    return
                continue
            job.run()
            # Idle before anyone knows that the job is done: the next one comes right after.
            with _lock:
                _busy.discard(job)
                _idle.append(self)
            job.finish()
            del job

    def _retire(self) -> bool:
        with _lock:
            if self not in _idle:
                return False
            _idle.remove(self)
            return True


_lock = threading.Lock()
_stack_size_lock = threading.Lock()
_idle: list[_Thread] = []
_busy: set[Job[Any]] = set()


def _stop_all() -> None:
    """Leave no script running into the end of the interpreter, which would abort the process."""
    with _lock:
        jobs = list(_busy)
    for job in jobs:
        job.cancel()
    deadline = time.monotonic() + EXIT_GRACE
    for job in jobs:
        job.join(max(0.0, deadline - time.monotonic()))


def _forget_threads() -> None:
    global _lock, _stack_size_lock
    _lock, _stack_size_lock = threading.Lock(), threading.Lock()
    _idle.clear()
    _busy.clear()


atexit.register(_stop_all)
# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_forget_threads)
