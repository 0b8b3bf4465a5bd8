"""Threads for blocking file work. Cancelling a call stops the work and waits for it.

The executors of the standard library cost twice as much per call once their futures are
shielded, and wait at exit for work that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from smokebox.engine.files.credentials import set_thread_umask
from smokebox.foundation.loop_shares import current_share, current_tenant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from smokebox.foundation.loop_shares import LoopShare


P = ParamSpec("P")
R = TypeVar("R")

THREADS = 16
# Of these, one party (a tenant) occupies at most so many.
PARTY_THREADS = 8
# Time limit for a cancelled call to wait for work that hangs in the kernel.
CANCEL_SECONDS = 5.0
_CHECK_SECONDS = 0.1
# Each call of the kernel gives up the interpreter, so that threads which make many keep the event
# loop from it. Work that is not short has one thread of a tenant, for a third of the time.
_SHORT_SECONDS = 0.005
_SLICE_SECONDS = 0.002
_REST_SECONDS = 0.004


class JobStopped(Exception):
    """Raised at a checkpoint of cancelled work."""


class Job:
    """One unit of work, which `stop` ends at its next checkpoint.

    Long work of a tenant rests at checkpoints while others use the event loop.
    """

    __slots__ = ("_always", "_has_turn", "_rest_at", "_share", "_stopped")

    def __init__(self) -> None:
        self._stopped = False
        self._always = False
        self._share: LoopShare | None = None
        self._rest_at = 0.0
        self._has_turn = False

    def begin(self, share: LoopShare | None) -> None:
        """Begin work for a tenant, in this thread."""
        self._share = share
        self._rest_at = time.perf_counter() + _SHORT_SECONDS

    def end(self) -> None:
        """End the work, in this thread."""
        self._give_turn()

    def stop_all(self) -> None:
        """Request the end of all threads that do this work."""
        self._stopped = self._always = True

    def stop(self) -> None:
        """Request the end. Safe from any thread."""
        self._stopped = True

    def check(self) -> None:
        """Raise `JobStopped` once only, so that cleanup code is not stopped again."""
        if self._stopped:
            self._stopped = self._always
            raise JobStopped
        if self._share is not None and time.perf_counter() >= self._rest_at:
            self._rest(self._share)

    def _rest(self, share: LoopShare) -> None:
        """Let the event loop run, and then the other long work of the tenant."""
        self._give_turn()
        if share.has_others:
            time.sleep(_REST_SECONDS)
            # Not for ever: the one that has the turn may wait for a lock of this one, or a peer.
            self._has_turn = share.thread_turn.acquire(timeout=_CHECK_SECONDS)
        self._rest_at = time.perf_counter() + _SLICE_SECONDS

    def _give_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            assert self._share is not None
            self._share.thread_turn.release()


class _ThreadState(threading.local):
    job: Job | None = None


_thread = _ThreadState()


def checkpoint() -> None:
    """End long work here if its call was cancelled. Does nothing in other threads."""
    job = _thread.job
    if job is not None:
        job.check()


@contextlib.contextmanager
def stoppable_threads(count: int) -> Iterator[Callable[..., None]]:
    """Run parts of the work of this thread in others, until the end of the block.

    Gives a function that starts a call. The block waits for all calls, stops them when the work is
    stopped, and raises the first error.
    """
    job, parts = Job(), list[Future[None]]()

    def perform(work: Callable[..., None], *args: object) -> None:
        set_thread_umask()
        _thread.job = job
        work(*args)

    with ThreadPoolExecutor(count, thread_name_prefix="smokebox-files") as pool:
        try:
            yield lambda work, *args: parts.append(pool.submit(perform, work, *args))
            while not all(part.done() for part in parts):
                wait(parts, timeout=_CHECK_SECONDS)
                checkpoint()
            for part in parts:
                part.result()
        except BaseException:
            job.stop_all()
            raise


class _PendingCall:
    """Work that a thread runs, and its result for the loop that submitted it."""

    def __init__(self, job: Job, work: Callable[[], object]) -> None:
        self._job = job
        self._work = work
        self._claim = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._share = current_share()
        self._result: asyncio.Future[object] | None = self._loop.create_future()
        self.done = False
        self._finished: asyncio.Event | None = None

    def claim(self) -> bool:
        """Claim the right to run or to drop the work. False if the other side was first."""
        return self._claim.acquire(blocking=False)

    def perform(self) -> None:
        """Run the work in this thread, unless it was dropped."""
        if not self.claim():
            return
        result: object = None
        failure: BaseException | None = None
        _thread.job = self._job
        self._job.begin(self._share)
        started = time.thread_time()
        try:
            result = self._work()
        except BaseException as error:
            failure = error
        finally:
            _thread.job = None
            self._job.end()
        seconds = time.thread_time() - started
        # The loop may have been closed meanwhile.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, seconds, result, failure)
        # The traceback of the error refers to this frame: together they would form a cycle.
        del failure

    def _deliver(self, seconds: float, result: object, failure: BaseException | None) -> None:
        self.done = True
        if self._share is not None:
            # It may have kept the interpreter from the event loop for all of this time.
            self._share.charge(seconds)
        if self._finished is not None:
            self._finished.set()
        if self._result is None or self._result.done():
            return
        if failure is None:
            self._result.set_result(result)
        else:
            self._result.set_exception(failure)

    async def result(self) -> object:
        """Return the result of the work. Works once."""
        assert self._result is not None
        try:
            return await self._result
        finally:
            # The traceback of an error refers to frames that refer to this object.
            self._result = None

    async def wait(self) -> None:
        """Wait for the end of the work despite further cancellation, up to a deadline."""
        self._finished = asyncio.Event()
        deadline = self._loop.time() + CANCEL_SECONDS
        while not self.done and self._loop.time() < deadline:
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._finished.wait()


class _Share:
    """The threads of one party, and the calls that have or wait for one of them."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(PARTY_THREADS)
        self.calls = 0


class Workers:
    """A pool of threads with their own umask, started on demand."""

    def __init__(self, threads: int = THREADS) -> None:
        self._max_threads = threads
        self._calls: SimpleQueue[_PendingCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0
        self._shares: dict[str, _Share] = {}

    async def run(self, job: Job, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work` in a thread.

        Cancelling stops the work at its next checkpoint and waits for that, so that it has no
        effects after the call has ended.
        """
        async with self._share():
            call = self._submit(job, functools.partial(work, *args, **kwargs))
            try:
                return await call.result()  # type: ignore[return-value]
            except asyncio.CancelledError:
                if not call.claim():
                    job.stop()
                    await call.wait()
                raise

    async def finish(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `work` in a thread and complete it even when cancelled."""
        call = self._submit(Job(), functools.partial(work, *args, **kwargs))
        try:
            await call.result()
        except asyncio.CancelledError:
            await call.wait()
            raise

    def close(self) -> None:
        """End the threads after their current work. Safe to repeat."""
        for _ in range(self._started):
            self._calls.put(None)

    @contextlib.asynccontextmanager
    async def _share(self) -> AsyncIterator[None]:
        """Wait until the party of this context may occupy another thread."""
        party = current_tenant()
        share = self._shares.setdefault(party, _Share())
        share.calls += 1
        try:
            async with share.slots if party else contextlib.nullcontext():
                yield
        finally:
            share.calls -= 1
            if not share.calls:
                del self._shares[party]

    def _submit(self, job: Job, work: Callable[[], object]) -> _PendingCall:
        call = _PendingCall(job, work)
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._started < self._max_threads:
                self._started += 1
                name = f"smokebox-files-{self._started}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._calls.put(call)
        return call

    def _serve(self) -> None:
        set_thread_umask()
        while (call := self._calls.get()) is not None:
            call.perform()
            # Drop the reference while waiting for the next call.
            del call
            with self._lock:
                self._idle += 1
