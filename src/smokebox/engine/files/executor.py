"""Blocking work on a sandbox's files, done at once or step by step from an event loop.

Each piece of work has its own duplicate of the root's descriptor: the number that the
jail gave may be another file by the time a thread looks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from smokebox.engine.files.credentials import acting_as
from smokebox.engine.files.rooted import Rooted
from smokebox.engine.workers import PATIENCE, Job, JobStopped, Workers
from smokebox.errors import SandboxGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from smokebox.engine.jail.api import Owner

P = ParamSpec("P")
R = TypeVar("R")
Out = TypeVar("Out")
In = TypeVar("In")

AT_ONCE = 4


class RootExecutor:
    """Where work on one sandbox's files is handed in.

    `root` gives the descriptor and the owner of the root as they are at the moment. At
    most `AT_ONCE` pieces run at a time, so that one sandbox does not take all threads.
    """

    def __init__(self, root: Callable[[], Awaitable[tuple[int, Owner]]], workers: Workers) -> None:
        self.workers = workers
        self._root = root
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._jobs: dict[Job, asyncio.Event] = {}
        self._open: set[SteppedWork[Any, Any]] = set()

    async def run(
        self, work: Callable[Concatenate[Rooted, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Do `work` on the root in a thread, as the root of the sandbox."""
        held = HeldRoot(*await self._root())
        try:
            return await self.call(held.once, lambda files: work(files, *args, **kwargs))
        finally:
            held.discard()

    async def open(
        self,
        work: Callable[Concatenate[Rooted, P], Generator[Out, In, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> SteppedWork[Out, In]:
        """Begin `work` that goes on step by step, until it ends or is closed."""
        held = HeldRoot(*await self._root())
        steps = SteppedWork(self, held, work(held.files, *args, **kwargs))
        self._open.add(steps)
        return steps

    async def call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do `work` in a thread when it is its turn. Raises `SandboxGone` when released."""
        job = Job()
        done = self._jobs[job] = asyncio.Event()
        try:
            async with self._turns:
                return await self.workers.run(job, work, *args, **kwargs)
        except JobStopped:
            raise _gone() from None
        finally:
            done.set()
            del self._jobs[job]

    @property
    def at_work(self) -> int:
        """How many calls are under way, or have begun and go on step by step."""
        return len(self._jobs) + len(self._open)

    def closed(self, steps: SteppedWork[Any, Any]) -> None:
        """Forget steps that have ended."""
        self._open.discard(steps)

    async def release(self) -> None:
        """End all work on the root, so that nothing holds it any more."""
        waiting = [asyncio.ensure_future(done.wait()) for done in self._jobs.values()]
        for job in self._jobs:
            job.stop()
        for steps in list(self._open):
            await steps.aclose()
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=PATIENCE)
            for task in late:
                task.cancel()


class HeldRoot:
    """A root that is ours until its work is done, in whichever thread that is."""

    def __init__(self, root: int, owner: Owner) -> None:
        self.files = Rooted(os.dup(root), owner)
        self._claim = threading.Lock()

    def once(self, work: Callable[[Rooted], R]) -> R:
        """Do `work` on the files, then close the root."""
        if not self._claim.acquire(blocking=False):
            raise JobStopped
        try:
            with acting_as(self.files.owner):
                return work(self.files)
        finally:
            os.close(self.files.root)

    def discard(self) -> None:
        """Close the root, unless a thread has it, which will."""
        if self._claim.acquire(blocking=False):
            os.close(self.files.root)


class SteppedWork(Generic[Out, In]):
    """A blocking generator over a sandbox's files, driven from an event loop."""

    def __init__(self, desk: RootExecutor, held: HeldRoot, work: Generator[Out, In, None]) -> None:
        self._desk = desk
        self._held = held
        self._work = work
        self._busy = threading.Lock()
        self._closed = False

    async def next(self) -> Out | None:
        """What it yields next; None at its end."""
        return await self._desk.call(self._step, lambda: next(self._work))

    async def send(self, value: In) -> Out | None:
        """What it yields for `value`; None at its end."""
        return await self._desk.call(self._step, lambda: self._work.send(value))

    async def aclose(self) -> None:
        """Break it off where it is, and let go of the root. Safe to repeat."""
        self._desk.closed(self)
        await self._desk.workers.finish(self._close)

    def _step(self, advance: Callable[[], Out]) -> Out | None:
        with self._busy:
            if self._closed:
                raise _gone()
            with acting_as(self._held.files.owner):
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
                with acting_as(self._held.files.owner):
                    self._work.close()
            finally:
                self._held.discard()


def _gone() -> SandboxGone:
    return SandboxGone(
        "the sandbox stopped while its files were in use.",
        hint="Call again: that starts it.",
        reason="stopped",
    )
