"""The life of one sandbox: not made, awake, asleep, gone. One owner, one step at a time.

The running jail is the truth and the record follows it: a run is written down before its
jail can outlive this process, and its end once nothing of it is left to see to. A step that
has begun goes on to its end, also when whoever asked for it stops waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine import starting
from smokebox.engine.files import leftovers
from smokebox.engine.jail import errands
from smokebox.engine.options import Options
from smokebox.engine.record.rows import SandboxRow, delete, update
from smokebox.engine.run import DESTROYED
from smokebox.errors import InvalidOption, NotFound, SandboxGone, SmokeboxError, StorageFull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from smokebox.egress.layers import Layers
    from smokebox.engine.jail.api import Jail
    from smokebox.engine.run import Run
    from smokebox.engine.workshop import Workshop

T = TypeVar("T")

_log = logging.getLogger("smokebox.engine")

ASLEEP = "it fell asleep"
STOPPED = "the engine was stopped"
CRASHED = "the engine was killed, and the sandbox did not outlive it"
SILENT = "its agent does not answer"

# After so long a call makes sure that it is being served at all.
PULSE_SECONDS = 10.0
# And so many times it may get no answer: a sandbox with little cpu is slow, and not stuck.
PULSES = 3
# What the parts of a sandbox may take to put things in order before it sleeps.
SETTLE_SECONDS = 2.0
# The kernel tells of a jail's end after that of the last process in it.
_END_SECONDS = 0.5
# No process has this number: the kernel's go up to 2 ** 22.
_NOBODY = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that lives in the runs of a sandbox: its files, processes or sessions.

    `begin` is told of a run that starts, and of one that goes on by another record, `adopt`
    takes over one of another engine's time, `ended` lets go of one that is over,
    also of one that was never taken over, `settle` finishes what it can before the end, and
    `close` lets go of whatever there is. A part that is `busy` keeps the sandbox from sleeping.
    """

    ended: Callable[[str], Awaitable[None]]
    begin: Callable[[Run], Awaitable[None]] | None = None
    settle: Callable[[], Awaitable[None]] | None = None
    adopt: Callable[[Run], Awaitable[None]] | None = None
    busy: Callable[[], bool] = lambda: False
    close: Callable[[], Awaitable[None]] | None = None


class Lifecycle:
    """The owner of one id. `use` wakes the sandbox and keeps it awake.

    `parts` live in it, and are renewed by `on_destroyed`.
    """

    def __init__(self, id: str, shop: Workshop, on_destroyed: Callable[[], None]) -> None:
        self.id = id
        self.parts: Sequence[Part] = ()
        self._shop = shop
        self._on_destroyed = on_destroyed
        self._lock = asyncio.Lock()
        self._asked = Options()
        self._row: SandboxRow | None = None
        self._run: Run | None = None
        self._active = 0
        self._used_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._destroying: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def run(self) -> Run | None:
        """The run that is, while the sandbox is awake."""
        return self._run if self._run is not None and self._run.jail.alive else None

    @property
    def used_at(self) -> float:
        """When the last call to its runs ended, and now while there is one; 0 before the first."""
        return time.time() if self._active and self._run is not None else self._used_at

    @property
    def asked(self) -> bool:
        """Whether something was asked for that its next call will see to."""
        return not self._asked.empty

    def ask(self, options: Options) -> None:
        """Have the sandbox be so from its next call on. Not a call itself."""
        self._asked = options.over(self._asked)

    async def row(self) -> SandboxRow | None:
        """What the record has of it, with what was asked for meanwhile."""
        async with self._lock:
            await self._change()
            return self._row

    async def directory(self) -> str:
        """What the sandbox has on the host's disk; empty before it was ever woken."""
        row = self._row or await self._shop.record.get(SandboxRow, self.id)
        return self._shop.home.box(row.key) if row is not None else ""

    @property
    def layers(self) -> Layers | None:
        """What it may reach, as far as that is known."""
        return self._row.egress if self._row is not None else None

    async def amend(self, change: Callable[[SandboxRow], SandboxRow]) -> None:
        """Change its record, and what runs with it. Wakes it where it was never woken."""
        if await self.row() is None:
            await self.wake()
        await asyncio.shield(self._keep(self._amend(change)))

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Run]:
        """The run of a sandbox that is awake, and stays so inside."""
        self._active += 1
        self._disarm()
        run = pulse = None
        try:
            run = await self.wake()
            loop = asyncio.get_running_loop()
            pulse = loop.call_later(PULSE_SECONDS, self._feel_pulse, run.jail)
            yield run
        except SandboxGone as error:
            if run is None or not await self._has_ended(run.jail):
                raise
            raise run.gone(await asyncio.shield(self._keep(self._why(run)))) from error
        finally:
            if pulse is not None:
                pulse.cancel()
                self._used_at = time.time()
            self._active -= 1
            self._arm()

    async def wake(self) -> Run:
        """The run that is, or another. Many may ask at once, and one is made."""
        if self._run is not None and self._run.jail.alive and self._asked.empty:
            return self._run
        return await asyncio.shield(self._keep(self._wake()))

    async def sleep(self, reason: str = ASLEEP) -> None:
        """End the run that is, and keep the files."""
        await asyncio.shield(self._keep(self._sleep(reason)))

    def stop(self, reason: str) -> None:
        """End the run that is for a fault of its own, such as too much of the disk."""
        if self._run is not None:
            self._keep(self._stop(self._run.jail, reason))

    async def destroy(self) -> None:
        """Remove every trace. Calls at the same time are one."""
        if self._destroying is None or self._destroying.done():
            self._check_open()
            self._destroying = self._keep(self._destroy())
        await asyncio.shield(self._destroying)

    async def adopt(self) -> None:
        """Take over what an engine before this one left: awake, half destroyed, or dead."""
        row = self._row = await self._shop.record.get(SandboxRow, self.id)
        if row is None:
            return
        if row.status == "destroying":
            await self.destroy()
            return
        async with self._lock:
            jail = await starting.find(self._shop, row)
            if jail is None:
                await self._found_dead(row, CRASHED)
                return
            try:
                image = await self._shop.images.get(row.image)
                self._run = await starting.as_run(self._shop, row, jail, image)
                await leftovers.sweep_running(self._run, self._shop.workers)
                for part in self.parts:
                    if part.adopt is not None:
                        await part.adopt(self._run)
            except (SmokeboxError, OSError) as error:
                self._run = None
                await jail.kill()
                await self._found_dead(row, f"it could not be taken over: {error}")
                return
            self._shop.guard.watch(self, self._run)
            self._keep(self._watch(self._run))
        self._arm()

    async def close(self, *, detach: bool) -> None:
        """Let go: put the sandbox to sleep, or leave it for another engine."""
        self._closed = True
        self._disarm()
        if self._destroying is not None:
            await asyncio.wait([self._destroying])
        try:
            async with self._lock:
                if detach and self._run is not None:
                    await self._settle()
                    run, self._run = self._run, None
                    self._shop.guard.forget(run)
                    run.jail.close()
                elif self._run is not None:
                    await self._end(STOPPED)
        finally:
            for part in self.parts:
                if part.close is not None:
                    await part.close()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _wake(self) -> Run:
        async with self._lock:
            self._check_open()
            if self._run is not None and not self._run.jail.alive:
                await self._end(await self._why_dead(self._run.jail))
            await self._change()
            if self._row is not None and self._row.status == "destroying":
                await self._remove(self._row)
            if self._run is None:
                self._run = await self._start()
                self._shop.guard.watch(self, self._run)
                self._keep(self._watch(self._run))
                try:
                    await self._begin()
                except SmokeboxError:
                    # Without all that it should have, a command could do harm.
                    await self._end(STOPPED)
                    raise
            return self._run

    async def _sleep(self, reason: str) -> None:
        async with self._lock:
            if self._run is not None:
                await self._end(reason)

    async def _stop(self, jail: Jail, reason: str) -> None:
        async with self._lock:
            if self._run is not None and self._run.jail is jail:
                await self._end(reason)

    async def _change(self) -> None:
        """Read the record, and write what was asked for since."""
        if self._row is None:
            self._row = await self._shop.record.get(SandboxRow, self.id)
        if self._row is None or self._asked.empty:
            return
        asked, self._asked = self._asked, Options()
        await self._rewrite(self._row, asked.change(self._row))

    async def _amend(self, change: Callable[[SandboxRow], SandboxRow]) -> None:
        async with self._lock:
            self._check_open()
            await self._change()
            if self._row is None:
                raise SandboxGone(
                    f"sandbox {self.id} was destroyed meanwhile.",
                    hint="Say it again: another is made.",
                    reason=DESTROYED,
                    sandbox_id=self.id,
                )
            await self._rewrite(self._row, change(self._row))

    async def _rewrite(self, row: SandboxRow, changed: SandboxRow) -> None:
        if changed == row:
            return
        run = self._run if self._run is not None and self._run.jail.alive else None
        if run is not None and changed.limits != run.limits:
            # First, as what uses more already refuses it.
            await run.jail.set_limits(changed.limits)
        await self._shop.record.write(update(changed))
        self._row = changed
        if run is not None:
            self._run = replace(
                run,
                env=starting.environment(run.image, changed),
                cwd=changed.settings.cwd,
                default_user=changed.settings.user,
                limits=changed.limits,
            )
            self._shop.guard.watch(self, self._run)
            self._arm()
            if changed.egress != row.egress:
                await self._begin()

    async def _begin(self) -> None:
        for part in self.parts:
            if part.begin is not None and self._run is not None:
                await part.begin(self._run)

    async def _start(self) -> Run:
        asked, self._asked = self._asked, Options()
        try:
            started = await starting.start(self._shop, self.id, self._row, asked)
        except (InvalidOption, NotFound):
            # What cannot be had is not asked for again.
            raise
        except BaseException:
            self._asked = self._asked.over(asked)
            raise
        self._row = started.row
        return started.run

    async def _end(self, reason: str) -> None:
        """End the run: kill it, tell its parts, write that down. The lock is held."""
        await self._settle()
        run, self._run = self._run, None
        assert run is not None
        assert self._row is not None
        self._disarm()
        self._shop.guard.forget(run)
        await run.jail.kill()
        run.spills.close()
        await self._over(self._row, reason)

    async def _settle(self) -> None:
        if self.run is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                for part in self.parts:
                    if part.settle is not None:
                        await part.settle()

    async def _found_dead(self, row: SandboxRow, reason: str) -> None:
        # First, as nobody looks again once it is idle.
        await leftovers.sweep_dead(self._shop.home.box(row.key), self._shop.workers)
        await self._over(row, reason)

    async def _over(self, row: SandboxRow, reason: str) -> None:
        self._row = replace(
            row,
            status="destroying" if row.status == "destroying" else "idle",
            jail=None,
            stop_reason=reason,
            last_active_at=max(row.last_active_at, self.used_at),
        )
        for part in self.parts:
            await part.ended(reason)
        if row.settings.ephemeral:
            await self._shop.remove(row.key)
        if row.status != "destroying":
            # Last: of what is idle nobody sees to the rest after a crash.
            await self._shop.record.write(update(self._row))

    async def _destroy(self) -> None:
        async with self._lock:
            self._asked = Options()
            if self._row is None:
                self._row = await self._shop.record.get(SandboxRow, self.id)
            if self._row is not None:
                await self._remove(self._row)

    async def _remove(self, row: SandboxRow) -> None:
        """Remove what is there; once begun, nothing but the rest of it can follow."""
        self._row = replace(row, status="destroying")
        # On a full disk, what is destroyed makes room for the record of that.
        with contextlib.suppress(StorageFull):
            await self._shop.record.write(update(self._row))
        if self._run is not None:
            await self._end(DESTROYED)
        elif (jail := await starting.find(self._shop, row)) is not None:
            await jail.kill()
        await self._shop.remove(row.key)
        await self._shop.record.write(delete(SandboxRow, self.id))
        self._row = None
        self._on_destroyed()

    async def _has_ended(self, jail: Jail) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await jail.wait()
        return not jail.alive

    def _feel_pulse(self, jail: Jail) -> None:
        self._keep(self._see_that_it_answers(jail))

    async def _see_that_it_answers(self, jail: Jail) -> None:
        """End a run whose agent is stuck: what waits for it would wait for ever.

        Connections are served in their order, so an answer to this one says that all calls
        before it are being served.
        """
        for _ in range(PULSES):
            try:
                if not jail.frozen:
                    await errands.send_signal(jail, _NOBODY, 0, tree=False)
                return
            except SandboxGone:
                if not jail.alive or jail.frozen or self._run is None or self._run.jail is not jail:
                    return
        self.stop(SILENT)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                f"the engine of sandbox {self.id} was closed.",
                hint="Open another with Host.open().",
                reason="closed",
                sandbox_id=self.id,
            )

    async def _watch(self, run: Run) -> None:
        """See a run that ends by itself to its end."""
        await run.jail.wait()
        async with self._lock:
            if self._run is not None and self._run.jail is run.jail:
                await self._end(await self._why_dead(run.jail))

    async def _why_dead(self, jail: Jail) -> str:
        with contextlib.suppress(SmokeboxError, OSError):
            if (await jail.stats()).oom_kills:
                return "it ran out of memory"
        return "its first process was killed"

    async def _why(self, run: Run) -> str:
        """Why a run has ended, once its end is written down."""
        async with self._lock:
            if self._run is not None and self._run.jail is run.jail:
                await self._end(await self._why_dead(run.jail))
            if self._row is None:
                return DESTROYED
            return self._row.stop_reason or STOPPED

    def _arm(self) -> None:
        """Begin to count the seconds without a call."""
        self._disarm()
        if self._active or self._run is None or self._row is None:
            return
        settings = self._row.settings
        if not settings.keep_alive and settings.sleep_after is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(settings.sleep_after, self._idle)

    def _disarm(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _idle(self) -> None:
        self._timer = None
        if any(part.busy() for part in self.parts):
            self._arm()
        elif not self._active:
            self._keep(self._sleep_if_idle())

    async def _sleep_if_idle(self) -> None:
        async with self._lock:
            if not self._active and self._run is not None:
                await self._end(ASLEEP)

    def _keep(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Have something done to its end, whether or not anybody waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("sandbox %s: a step failed: %s", self.id, error)
