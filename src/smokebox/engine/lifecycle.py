"""The life of one sandbox: not made, awake, asleep, gone. One owner, one step at a time.

The running jail is the truth and the record follows it: a run is written down before its
jail can outlive this process, and its end before anybody is told of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.jail.cell import IO
from smokebox.engine.options import DEFAULT_IMAGE, Options
from smokebox.engine.record_rows import SandboxRow, delete, put, update
from smokebox.engine.rooted import Rooted
from smokebox.engine.run import Run
from smokebox.engine.workers import Job
from smokebox.errors import SandboxGone, SmokeboxError
from smokebox.sandbox.spill import SpillFolder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.api import Jail, Jailer
    from smokebox.engine.workshop import Workshop

ASLEEP = "it fell asleep"
DESTROYED = "it was destroyed"
STOPPED = "the engine was stopped"
CRASHED = "the engine was killed, and the sandbox did not outlive it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that lives in the runs of a sandbox: its files, processes or sessions.

    `adopt` takes over a run of another engine's time, `ended` lets go of one that is over,
    `close` of whatever there is; a part that is `busy` keeps the sandbox from sleeping.
    """

    ended: Callable[[Run, str], Awaitable[None]]
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
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._destroying: asyncio.Task[None] | None = None
        self._reason: str | None = None

    @property
    def run(self) -> Run | None:
        """The run that is, while the sandbox is awake."""
        return self._run if self._run is not None and self._run.jail.alive else None

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

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Run]:
        """The run of a sandbox that is awake, and stays so inside."""
        self._active += 1
        self._disarm()
        run = None
        try:
            run = await self.wake()
            yield run
        except SandboxGone as error:
            if run is None or run.jail.alive:
                raise
            raise run.gone(await self._why(run)) from error
        finally:
            self._active -= 1
            self._arm()

    async def wake(self) -> Run:
        """The run that is, or another. Many may ask at once, and one is made."""
        if self._run is not None and self._run.jail.alive and self._asked.empty:
            return self._run
        async with self._lock:
            await self._change()
            if self._run is not None and not self._run.jail.alive:
                await self._end(await self._why_dead(self._run.jail))
            if self._run is None:
                self._run = await self._start()
                self._shop.guard.watch(self, self._run)
                self._keep(self._watch(self._run))
            return self._run

    async def sleep(self, reason: str = ASLEEP) -> None:
        """End the run that is, and keep the files."""
        async with self._lock:
            if self._run is not None:
                await self._end(reason)

    async def stop(self, reason: str) -> None:
        """End the run for a fault of its own, such as too much of the disk."""
        self._reason = reason
        await self.sleep(reason)

    async def destroy(self) -> None:
        """Remove every trace. Calls at the same time are one."""
        if self._destroying is None or self._destroying.done():
            self._destroying = asyncio.create_task(self._destroy())
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
            jail = await self._find(row)
            if jail is None:
                await self._over(row, CRASHED)
                return
            image = await self._shop.images.get(row.image)
            self._run = await self._as_run(row, jail, image)
            self._shop.guard.watch(self, self._run)
            for part in self.parts:
                if part.adopt is not None:
                    await part.adopt(self._run)
            self._keep(self._watch(self._run))
        self._arm()

    async def close(self, *, detach: bool) -> None:
        """Let go: put the sandbox to sleep, or leave it for another engine."""
        self._disarm()
        if self._destroying is not None:
            await asyncio.wait([self._destroying])
        async with self._lock:
            if detach and self._run is not None:
                run, self._run = self._run, None
                self._shop.guard.forget(run)
                run.jail.close()
            elif self._run is not None:
                await self._end(STOPPED)
        for part in self.parts:
            if part.close is not None:
                await part.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _change(self) -> None:
        """Read the record, and write what was asked for since."""
        if self._row is None:
            self._row = await self._shop.record.get(SandboxRow, self.id)
        if self._row is None or self._asked.empty:
            return
        asked, self._asked = self._asked, Options()
        changed = asked.change(self._row)
        if changed == self._row:
            return
        await self._shop.record.write(update(changed))
        limits, self._row = changed.limits != self._row.limits, changed
        if self._run is not None:
            if limits:
                await self._run.jail.set_limits(changed.limits)
            self._run = replace(
                self._run,
                env={**self._run.image.env, **changed.env},
                cwd=changed.settings.cwd,
                default_user=changed.settings.user,
                limits=changed.limits,
            )
            self._shop.guard.watch(self, self._run)

    async def _start(self) -> Run:
        shop, row, asked = self._shop, self._row, self._asked
        image = await shop.images.get((row.image if row else asked.image) or DEFAULT_IMAGE)
        jailer = self._jailer(row)
        ready = shop.pool.take(jailer, image) if row is None else None
        if row is None:
            key = ready.spec.key if ready is not None else shop.key()
            row = asked.row(self.id, key=key, digest=image.digest, tier=jailer.tier)
        spec = shop.spec(row.key, image, row.limits)
        jail: Jail | None = None
        try:
            jail = ready.jail if ready is not None else await jailer.make(spec)
            awake = replace(
                row,
                status="active",
                generation=row.generation + 1,
                jail=jail.state,
                last_active_at=time.time(),
                stop_reason=None,
            )
            await shop.record.write(put(awake))
            await jail.enter(self.id, row.limits)
            run = await self._as_run(awake, jail, image)
        except BaseException:
            await asyncio.shield(self._undo(jail, row))
            raise
        self._row, self._asked = awake, Options()
        return run

    async def _undo(self, jail: Jail | None, row: SandboxRow) -> None:
        """Leave nothing of a start that failed; a sandbox that was there stays as it was."""
        if jail is not None:
            await jail.kill()
        if self._row is None:
            await self._shop.record.write(delete(SandboxRow, self.id))
            await self._shop.remove(row.key)
        else:
            await self._shop.record.write(update(replace(row, status="idle", jail=None)))

    async def _as_run(self, row: SandboxRow, jail: Jail, image: Image) -> Run:
        rooted = Rooted(jail.root, jail.owner)
        directory = self._shop.home.box(row.key)
        shell = await self._shop.workers.run(Job(), _prepare, rooted, row.settings.cwd)
        return Run(
            id=self.id,
            jail=jail,
            generation=row.generation,
            directory=directory,
            image=image,
            env={**image.env, **row.env},
            cwd=row.settings.cwd,
            default_user=row.settings.user,
            shell=shell,
            limits=row.limits,
            spills=SpillFolder(parent=f"{directory}/run/io", seen_at=IO),
            read=lambda path: self._shop.workers.run(Job(), rooted.read, path),
        )

    async def _end(self, reason: str) -> None:
        """End the run: kill it, write that down, tell its parts. The lock is held."""
        run, self._run = self._run, None
        assert run is not None
        assert self._row is not None
        self._disarm()
        self._shop.guard.forget(run)
        await run.jail.kill()
        run.spills.close()
        await self._over(self._row, reason)
        for part in self.parts:
            await part.ended(run, reason)

    async def _over(self, row: SandboxRow, reason: str) -> None:
        self._row = replace(
            row, status="idle", jail=None, stop_reason=reason, last_active_at=time.time()
        )
        await self._shop.record.write(update(self._row))
        if row.settings.ephemeral:
            await self._shop.remove(row.key)

    async def _destroy(self) -> None:
        async with self._lock:
            self._asked = Options()
            if self._row is None:
                self._row = await self._shop.record.get(SandboxRow, self.id)
            row = self._row
            if row is None:
                return
            await self._shop.record.write(update(replace(row, status="destroying")))
            if self._run is None and row.jail is not None and (jail := await self._find(row)):
                await jail.kill()
            elif self._run is not None:
                await self._end(DESTROYED)
            await self._shop.remove(row.key)
            await self._shop.record.write(delete(SandboxRow, self.id))
            self._row = None
            self._on_destroyed()

    async def _find(self, row: SandboxRow) -> Jail | None:
        if row.jail is None:
            return None
        image = await self._shop.images.get(row.image)
        spec = self._shop.spec(row.key, image, row.limits)
        return await self._jailer(row).adopt(spec, row.jail)

    def _jailer(self, row: SandboxRow | None) -> Jailer:
        asked = row.tier if row is not None else self._asked.tier
        return self._shop.jailer(asked or self._shop.tier)

    async def _watch(self, run: Run) -> None:
        """See a run that ends by itself to its end."""
        await run.jail.wait()
        async with self._lock:
            if self._run is not None and self._run.jail is run.jail:
                await self._end(await self._why_dead(run.jail))

    async def _why_dead(self, jail: Jail) -> str:
        reason, self._reason = self._reason, None
        if reason is not None:
            return reason
        with contextlib.suppress(SmokeboxError, OSError):
            if (await jail.stats()).oom_kills:
                return "it ran out of memory"
        return "its first process was killed"

    async def _why(self, run: Run) -> str:
        """Why a run has ended, once its end is written down."""
        async with self._lock:
            if self._run is not None and self._run.jail is run.jail:
                await self._end(await self._why_dead(run.jail))
            return (self._row.stop_reason if self._row is not None else None) or DESTROYED

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

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _prepare(rooted: Rooted, cwd: str) -> str:
    """Make sure of the directory that commands start in; the shell that they start with."""
    rooted.make_directory(cwd, recursive=True)
    return "/bin/bash" if rooted.exists("/bin/bash") else "/bin/sh"
