"""Blocking work on a sandbox's files, run in threads from an event loop.

Each call has its own duplicate of the root's descriptor: the jail's may be closed, and its number
reused for another file, before a thread gets to it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from smokebox.engine.files.credentials import acting_as
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.workers import CANCEL_SECONDS, Job, JobStopped, Workers
from smokebox.errors import SandboxGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from smokebox.engine.jail.spec import Owner

P = ParamSpec("P")
R = TypeVar("R")
Out = TypeVar("Out")
In = TypeVar("In")

MAX_RUNNING = 4


class RootExecutor:
    """Runs work on one sandbox's files.

    `root` returns the current descriptor and owner of the root. At most `MAX_RUNNING` calls run
    at a time, so that one sandbox does not occupy all threads.
    """

    def __init__(self, root: Callable[[], Awaitable[tuple[int, Owner]]], workers: Workers) -> None:
        self.workers = workers
        self._root = root
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._jobs: dict[Job, asyncio.Event] = {}
        self._open: set[ThreadedGenerator[Any, Any]] = set()

    async def run(
        self, work: Callable[Concatenate[RootedFiles, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `work` with the files in a thread, as root of the sandbox."""
        root = RootHandle(*await self._root())
        try:
            return await self.call(root.run, lambda files: work(files, *args, **kwargs))
        finally:
            root.close()

    async def open(
        self,
        work: Callable[Concatenate[RootedFiles, P], Generator[Out, In, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ThreadedGenerator[Out, In]:
        """Return a generator over the files, which the caller advances and closes."""
        root = RootHandle(*await self._root())
        generator = ThreadedGenerator(self, root, work(root.files, *args, **kwargs))
        self._open.add(generator)
        return generator

    async def call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `work` in a thread once a slot is free. Raises `SandboxGone` when released."""
        job = Job()
        done = self._jobs[job] = asyncio.Event()
        try:
            async with self._slots:
                return await self.workers.run(job, work, *args, **kwargs)
        except JobStopped:
            raise _gone() from None
        finally:
            done.set()
            del self._jobs[job]

    @property
    def active(self) -> int:
        """Number of running calls and open generators."""
        return len(self._jobs) + len(self._open)

    def closed(self, generator: ThreadedGenerator[Any, Any]) -> None:
        """Forget a generator that was closed."""
        self._open.discard(generator)

    async def release(self) -> None:
        """Stop all work, so that nothing holds the root any longer."""
        waiting = [asyncio.ensure_future(done.wait()) for done in self._jobs.values()]
        for job in self._jobs:
            job.stop()
        for generator in list(self._open):
            await generator.aclose()
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=CANCEL_SECONDS)
            for task in late:
                task.cancel()


class RootHandle:
    """A duplicate of a root's descriptor, closed by the thread that uses it or by its owner."""

    def __init__(self, root: int, owner: Owner) -> None:
        self.files = RootedFiles(os.dup(root), owner)
        self._claim = threading.Lock()

    def run(self, work: Callable[[RootedFiles], R]) -> R:
        """Call `work` as root of the sandbox, then close the root. Works once."""
        if not self._claim.acquire(blocking=False):
            raise JobStopped
        try:
            with acting_as(self.files.owner):
                return work(self.files)
        finally:
            os.close(self.files.root)

    def close(self) -> None:
        """Close the root, unless a thread runs `run`, which will. Safe to repeat."""
        if self._claim.acquire(blocking=False):
            os.close(self.files.root)


class ThreadedGenerator(Generic[Out, In]):
    """A blocking generator over a sandbox's files, advanced from an event loop."""

    def __init__(
        self, executor: RootExecutor, root: RootHandle, generator: Generator[Out, In, None]
    ) -> None:
        self._executor = executor
        self._root = root
        self._generator = generator
        self._busy = threading.Lock()
        self._closed = False

    async def next(self) -> Out | None:
        """Return the next value; None at the end."""
        return await self._executor.call(self._advance, lambda: next(self._generator))

    async def send(self, value: In) -> Out | None:
        """Send a value and return the next one; None at the end."""
        return await self._executor.call(self._advance, lambda: self._generator.send(value))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the generator and the root. Safe to repeat."""
        self._executor.closed(self)
        await self._executor.workers.finish(self._close)

    def _advance(self, advance: Callable[[], Out]) -> Out | None:
        with self._busy:
            if self._closed:
                raise _gone()
            with acting_as(self._root.files.owner):
                try:
                    return advance()
                except StopIteration:
                    return None

    def _close(self) -> None:
        with self._busy:
            if self._closed:
                return
            self._closed = True
            try:
                with acting_as(self._root.files.owner):
                    self._generator.close()
            finally:
                self._root.close()


def _gone() -> SandboxGone:
    return SandboxGone(
        "the sandbox stopped while its files were in use.",
        hint="Call again: that starts it.",
        reason="stopped",
    )
