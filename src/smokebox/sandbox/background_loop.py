"""Event loop on a background thread, for callers that are not async or run on another loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from smokebox.errors import SandboxGone, Unsupported

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

CLOSING_TIMEOUT = 30.0


@dataclass(slots=True)
class _Job(Generic[T]):
    """Coroutine for a loop. `future` completes only after the task has."""

    work: Coroutine[object, object, T]
    future: Future[T] = field(default_factory=Future)
    loop: asyncio.AbstractEventLoop | None = None
    task: asyncio.Task[T] | None = None

    def submit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start it on a loop of another thread."""
        self.loop = loop
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Cancel it, whether it was submitted or not. Safe to repeat."""
        if self.loop is None:
            self._drop()
            return
        # A closed loop has cancelled all of its tasks.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        assert self.loop is not None
        self.task = self.loop.create_task(self.work)
        self.task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._set_cancelled()
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())

    def _cancel(self) -> None:
        # Calls run in the order in which they were made: it would have been started before.
        if self.task is None:
            self._drop()
        else:
            self.task.cancel()

    def _drop(self) -> None:
        self.work.close()
        self._set_cancelled()

    def _set_cancelled(self) -> None:
        if not self.future.done():
            self.future.cancel()
            # `wait` returns for a cancelled future only after this.
            self.future.set_running_or_notify_cancel()


class BackgroundLoop:
    """Runs coroutines on one loop in one thread, started by the first of them.

    `run` blocks its caller and `call` is awaited; either may be used from a thread with or without
    a running loop. Interrupting or cancelling either cancels the coroutine. A forked process starts
    another loop with its first call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        _all.add(self)

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` and wait for it, blocking this thread."""
        if threading.current_thread() is self._thread:
            work.close()
            raise Unsupported(
                "a blocking call was made on the backend's own event loop.",
                hint="Await the async method of the same name (aread, aexecute, ...) instead.",
                operation="run",
            )
        job = _Job(work)
        try:
            self._submit(job)
            return job.future.result()
        except CancelledError:
            raise _closed_during_call() from None
        except BaseException:
            # An interrupt (Ctrl-C) arrives here, before the work runs or while it does.
            job.cancel()
            wait([job.future], timeout=CLOSING_TIMEOUT)
            raise

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` and wait for it without blocking the caller's loop."""
        job = _Job(work)
        self._submit(job)
        waiter = asyncio.wrap_future(job.future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if waiter.cancelled():
                raise _closed_during_call() from None
            # Return only after the cancelled work has ended.
            job.cancel()
            await asyncio.wait([waiter])
            raise

    def close(self) -> None:
        """Cancel running work, stop the loop and end the thread. Safe to repeat."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        _stop(loop)
        if thread is not threading.current_thread():
            thread.join(CLOSING_TIMEOUT)

    def forked(self) -> None:
        """Drop a loop that runs in the parent of this process."""
        self._lock = threading.Lock()
        # Keep a reference: collecting the loop would close file descriptors of the parent's loop.
        _loops_of_parents.append(self._loop)
        self._loop = self._thread = None

    def _submit(self, job: _Job[T]) -> None:
        try:
            # Under the lock, so that no job is passed to a loop that is stopping.
            with self._lock:
                job.submit(self._running())
        except BaseException:
            job.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise Unsupported(
                "this backend has been closed.",
                hint="Create another backend with another sandbox.",
                operation="run",
            )
        if self._loop is None:
            ready: Future[asyncio.AbstractEventLoop] = Future()
            # The thread holds no reference to its owner, whose finalizer stops it.
            self._thread = threading.Thread(
                target=_serve, args=(ready,), name="smokebox-loop", daemon=True
            )
            self._thread.start()
            self._loop = ready.result(CLOSING_TIMEOUT)
            weakref.finalize(self, _stop, self._loop)
        return self._loop


_all: weakref.WeakSet[BackgroundLoop] = weakref.WeakSet()
_loops_of_parents: list[asyncio.AbstractEventLoop | None] = []


def _after_fork() -> None:
    for loop in list(_all):
        loop.forked()


os.register_at_fork(after_in_child=_after_fork)


def _serve(ready: Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:
        ready.set_result(runner.get_loop())
        runner.get_loop().run_forever()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)


def _closed_during_call() -> SandboxGone:
    return SandboxGone(
        "the backend was closed while this call ran.",
        hint="Close it after its last call.",
        reason="closed",
    )
