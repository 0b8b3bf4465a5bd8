"""Threads with deep stacks, and a lock across event loops, shared by all virtual sandboxes."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from smokebox.sandbox.stack import MIN_STACK_SIZE, stack_size

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")

# Most work takes microseconds, less than waking an event loop: block for this long first.
QUICK = 0.0002
IDLE_SECONDS = 20.0
EXIT_GRACE = 2.0


class ThreadJob(Generic[T]):
    """Function that runs on one of the threads and is awaited from an event loop."""

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
        """Run the function."""
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Mark the job as done and wake the waiter."""
        self.done = True
        self._running.release()
        if self._wake is not None:
            self._wake()

    def cancel(self) -> None:
        """Ask the function to end early, if it can."""
        if self._cancel is not None:
            self._cancel()

    def join(self, seconds: float) -> bool:
        """Block for at most `seconds`; return whether the job is done."""
        if self._running.acquire(timeout=seconds):
            self._running.release()
        return self.done

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait without blocking the event loop; return whether the job is done in time."""
        loop = asyncio.get_running_loop()
        finished = loop.create_future()

        def wake() -> None:
            # The loop may have closed under a cancelled caller.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, finished)

        self._wake = wake
        # The job may have finished before the callback was set.
        if self.done:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await finished
        return self.done

    def result(self) -> T:
        """Return the function's result, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def run(work: Callable[[], T]) -> T:
    """Run a blocking function on one of the threads and return its result."""
    job = ThreadJob(work)
    start(job)
    if not job.join(QUICK):
        await job.wait()
    return job.result()


def start(job: ThreadJob[T]) -> None:
    """Pass a job to an idle thread, or to a new one."""
    with _lock:
        thread = _idle.pop() if _idle else None
        _busy.add(job)
    if thread is None:
        try:
            thread = _start_thread()
        except BaseException:
            _busy.discard(job)
            raise
    thread.jobs.put(job)


def _start_thread() -> _ShellThread:
    """Start a thread with a deep stack."""
    size = stack_size()
    while True:
        thread = _ShellThread()
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


class _ShellThread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="smokebox-shell", daemon=True)
        self.jobs: SimpleQueue[ThreadJob[Any]] = SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=IDLE_SECONDS)
            except Empty:
                if self._retire():
                    return
                continue
            job.run()
            # Idle before the job is reported done: the next one follows at once.
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
_idle: list[_ShellThread] = []
_busy: set[ThreadJob[Any]] = set()


def _stop_all() -> None:
    """Stop all scripts before interpreter shutdown, which would otherwise abort the process."""
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


class FifoLock:
    """Lock that callers from any event loop acquire in FIFO order.

    `asyncio.Lock` belongs to the first loop that waited for it, and a sandbox outlives loops.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            waiter = asyncio.get_running_loop().create_future()
            self._queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            with self._guard:
                queued = waiter in self._queue
                if queued:
                    self._queue.remove(waiter)
            if not queued:
                # It was woken but is cancelled: wake the next one.
                self._wake_next()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._wake_next()

    def _wake_next(self) -> None:
        with self._guard:
            while self._queue:
                waiter = self._queue.popleft()
                # A closed loop has no waiter.
                with suppress(RuntimeError):
                    waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
                    return
            self._taken = False
