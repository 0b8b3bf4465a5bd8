"""The lifecycle of one sandbox: wake, sleep, adopt, destroy, one step at a time.

The running jail is the truth and the record follows it: a run is recorded before its jail can
outlive this process, and its end after everything of it is cleaned up. A step that has begun
runs to its end, even when its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine import startup
from smokebox.engine.files import leftovers
from smokebox.engine.jail import guest_init, guest_requests
from smokebox.engine.options import CheckedOptions
from smokebox.engine.record.rows import SandboxRow, delete, update
from smokebox.engine.run import DESTROYED, EXPIRED, STOPPED
from smokebox.engine.snapshots.checkpoint_rule import CheckpointRule
from smokebox.errors import (
    Forbidden,
    InvalidOption,
    LimitReached,
    NotFound,
    SandboxGone,
    SmokeboxError,
    StorageFull,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from smokebox.egress.layers import EgressLayers
    from smokebox.engine.context import EngineContext
    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.record.rows import StopCause
    from smokebox.engine.run import Run, RunPart
    from smokebox.foundation.loop_shares import LoopShare

T = TypeVar("T")

_log = logging.getLogger("smokebox.engine")

ASLEEP = "it fell asleep"
CRASHED = "the engine was killed, and the sandbox did not outlive it"
UNRESPONSIVE = "its guest init does not respond"

# A call that takes this long checks that the guest init responds at all.
PROBE_SECONDS = 10.0
# Missed responses before giving up: a sandbox with little cpu is slow, not stuck.
PROBES = 3
# Time limit for the parts of a sandbox to finish pending work before it sleeps.
BEFORE_END_SECONDS = 2.0
# The kernel reports the end of a jail later than that of its last process.
_END_SECONDS = 0.5
# No process has this pid: the kernel's maximum is 2 ** 22.
_UNUSED_PID = 1 << 23


class Lifecycle:
    """The owner of one sandbox id. `use` wakes the sandbox and keeps it awake.

    `parts` are its components. `on_destroyed` replaces them with fresh ones.
    """

    def __init__(self, id: str, context: EngineContext, on_destroyed: Callable[[], None]) -> None:
        self.id = id
        self.parts: Sequence[RunPart] = ()
        self._context = context
        self._on_destroyed = on_destroyed
        self._lock = asyncio.Lock()
        self._pending: CheckedOptions | None = None
        self._row: SandboxRow | None = None
        self._run: Run | None = None
        self._active = 0
        self._held = 0
        self._idle_while_held = False
        self._used_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._destroying: asyncio.Task[None] | None = None
        self._removal_reason = DESTROYED
        self._closed = False

    @property
    def run(self) -> Run | None:
        """The current run, while the sandbox is awake."""
        return self._run if self._run is not None and self._run.jail.alive else None

    @property
    def used_at(self) -> float:
        """Time when the last call ended, the current time during a call, 0 before the first."""
        return time.time() if self._active and self._run is not None else self._used_at

    @property
    def has_pending_options(self) -> bool:
        """True while options wait for the next call to apply them."""
        return self._pending is not None

    def set_options(self, options: CheckedOptions) -> None:
        """Apply options at the next call. Does not count as a call itself."""
        self._pending = options if self._pending is None else options.over(self._pending)

    async def row(self) -> SandboxRow | None:
        """Return the row of the record, with pending options applied."""
        async with self._lock:
            await self._apply_pending()
            return self._row

    @property
    def checkpoints(self) -> CheckpointRule:
        """The rule of automatic checkpoints."""
        return self._row.settings.checkpoints if self._row is not None else CheckpointRule()

    async def directory(self) -> str:
        """Return the directory of the sandbox on the host; empty before it was ever woken."""
        row = self._row or await self._context.record.get(SandboxRow, self.id)
        return self._context.storage.directory(row.key) if row is not None else ""

    @property
    def layers(self) -> EgressLayers | None:
        """The egress layers, or None while the record has not been read."""
        return self._row.egress if self._row is not None else None

    @property
    def share(self) -> LoopShare | None:
        """The share of the event loop that its tenant has; None while the record is not read."""
        row = self._row
        return self._context.shares.share(row.settings.group) if row is not None else None

    async def update(self, change: Callable[[SandboxRow], SandboxRow]) -> None:
        """Change the record and the current run. Wakes a sandbox that was never woken."""
        if await self.row() is None:
            await self.wake()
        await asyncio.shield(self._spawn(self._update(change)))

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Run]:
        """Wake the sandbox and keep it awake inside the block."""
        self._active += 1
        self._stop_idle_timer()
        run = probe = None
        try:
            run = await self.wake()
            loop = asyncio.get_running_loop()
            probe = loop.call_later(PROBE_SECONDS, self._start_probe, run.jail)
            yield run
        except SandboxGone as error:
            if run is None or not await self._has_ended(run.jail):
                raise
            reason = await asyncio.shield(self._spawn(self._stop_reason(run)))
            raise run.gone(reason) from error
        finally:
            if probe is not None:
                probe.cancel()
                self._used_at = time.time()
            self._active -= 1
            self._start_idle_timer()

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[Run | None]:
        """Put off falling asleep in the block, which gets the current run, and is no call."""
        self._held += 1
        try:
            yield self.run
        finally:
            self._held -= 1
            if self._idle_while_held and not self._held:
                self._idle()

    async def wake(self) -> Run:
        """Return the current run, or start one. Concurrent calls share one start."""
        if self._run is not None and self._run.jail.alive and self._pending is None:
            return self._run
        return await asyncio.shield(self._spawn(self._wake()))

    async def sleep(self) -> None:
        """End the current run and keep the files."""
        await asyncio.shield(self._spawn(self._sleep()))

    async def change_files(
        self,
        change: Callable[[SandboxRow], Awaitable[SandboxRow]],
        *,
        reason: str | None = None,
    ) -> bool:
        """Work on the files of a sandbox while nothing can start it.

        With a `reason`, its run is ended first; without, nothing happens and False is returned if
        it runs. `change` gets the row, and returns it as it has recorded it.
        """
        return await asyncio.shield(self._spawn(self._change_files(change, reason)))

    def stop(self, reason: str, *, cause: StopCause | None = None) -> None:
        """End the current run because it exceeded a limit or is broken."""
        if self._run is not None:
            self._spawn(self._stop(self._run.jail, reason, cause))

    async def destroy(self) -> None:
        """Remove every trace. Concurrent calls are merged."""
        if self._destroying is None or self._destroying.done():
            self._check_open()
            self._destroying = self._spawn(self._destroy())
        await asyncio.shield(self._destroying)

    async def expire(self) -> None:
        """Destroy the sandbox, in use or not, if its lifetime is over."""
        await asyncio.shield(self._spawn(self._expire()))

    async def adopt(self) -> None:
        """Take over a sandbox that another engine left awake, half destroyed or dead."""
        row = self._row = await self._context.record.get(SandboxRow, self.id)
        if row is None:
            return
        if row.status == "destroying":
            await self.destroy()
            return
        async with self._lock:
            jail = await startup.find(self._context, row)
            if jail is None:
                await self._clean_up_dead(row, CRASHED)
                return
            try:
                image = await startup.image_of(self._context, row)
                await self._confine(row)
                self._run = await startup.as_run(self._context, row, jail, image)
                await leftovers.sweep_running(self._run, self._context.workers)
                for part in self.parts:
                    await part.adopt(self._run)
            except (SmokeboxError, OSError) as error:
                self._run = None
                await jail.kill()
                await self._clean_up_dead(row, f"it could not be adopted: {error}")
                return
            self._context.guard.watch(self, self._run, before=row)
            self._spawn(self._watch(self._run))
        self._start_idle_timer()

    async def close(self, *, detach: bool) -> None:
        """Release the sandbox: put it to sleep, or leave it running for another engine."""
        self._closed = True
        self._stop_idle_timer()
        if self._destroying is not None:
            await asyncio.wait([self._destroying])
        try:
            async with self._lock:
                if detach and self._run is not None:
                    await self._prepare_end()
                    run, self._run = self._run, None
                    self._context.guard.forget(run)
                    run.jail.close()
                elif self._run is not None:
                    await self._end(STOPPED)
        finally:
            for part in self.parts:
                await part.aclose()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _wake(self) -> Run:
        async with self._lock:
            self._check_open()
            if self._run is not None and not self._run.jail.alive:
                await self._end(await self._death_reason(self._run.jail))
            # Before options are applied: they are for the next sandbox of this id.
            await self._remove_expired()
            await self._apply_pending()
            if self._row is not None and self._row.status == "destroying":
                await self._remove(self._row)
            if self._run is None:
                before = self._row
                self._run = await self._start()
                self._context.guard.watch(self, self._run, before=before)
                self._spawn(self._watch(self._run))
                try:
                    await self._begin()
                    assert self._row is not None
                    await self._confine(self._row)
                except (SmokeboxError, OSError):
                    # A command could do harm in a sandbox that is only partly set up.
                    await self._end(STOPPED)
                    raise
            return self._run

    async def _sleep(self, *, if_idle: bool = False) -> None:
        async with self._lock:
            if self._run is not None and not (if_idle and self._active):
                await self._end(ASLEEP)

    async def _stop(self, jail: Jail, reason: str, cause: StopCause | None) -> None:
        async with self._lock:
            if self._is_current(jail):
                await self._end(reason, cause)

    async def _confine(self, row: SandboxRow) -> None:
        """Let the kernel enforce the disk limit, where it can."""
        disk = await self._context.snapshots.disk_limit(row.id, row.limits.disk)
        await asyncio.to_thread(self._context.storage.confine, row.key, disk)

    async def _change_files(
        self, change: Callable[[SandboxRow], Awaitable[SandboxRow]], reason: str | None
    ) -> bool:
        async with self._lock:
            self._check_open()
            if self._run is not None and self._run.jail.alive and reason is None:
                return False
            if self._run is not None:
                await self._end(reason or await self._death_reason(self._run.jail))
            await self._apply_pending()
            if self._row is None or self._row.status == "destroying":
                raise self._destroyed()
            self._row = await change(self._row)
            return True

    def _destroyed(self) -> SandboxGone:
        return SandboxGone(
            f"sandbox {self.id} was destroyed meanwhile.",
            hint="Repeat the call: it creates a new sandbox.",
            reason=DESTROYED,
            sandbox_id=self.id,
        )

    def _is_current(self, jail: Jail) -> bool:
        return self._run is not None and self._run.jail is jail

    async def _load(self) -> None:
        if self._row is None:
            self._row = await self._context.record.get(SandboxRow, self.id)

    async def _apply_pending(self) -> None:
        """Read the record, and write the pending options to it."""
        await self._load()
        if self._row is None or self._pending is None:
            return
        options, self._pending = self._pending, None
        await self._rewrite(self._row, options.change(self._row))

    async def _update(self, change: Callable[[SandboxRow], SandboxRow]) -> None:
        async with self._lock:
            self._check_open()
            await self._apply_pending()
            if self._row is None:
                raise self._destroyed()
            await self._rewrite(self._row, change(self._row))

    async def _rewrite(self, row: SandboxRow, changed: SandboxRow) -> None:
        if changed == row:
            return
        run = self.run
        if run is not None and changed.limits != run.limits:
            # Before the record: the kernel refuses limits below current use.
            await run.jail.set_limits(changed.limits)
        if changed.limits.disk != row.limits.disk:
            await self._confine(changed)
        await self._context.record.write(update(changed))
        self._row = changed
        self._context.expirations.set(self.id, changed.expires_at)
        if run is not None:
            self._run = replace(
                run,
                env=startup.environment(run.image, changed),
                cwd=changed.settings.cwd,
                default_user=changed.settings.user,
                limits=changed.limits,
            )
            run.jail.set_orphan_timeout(changed.settings.orphan_timeout)
            self._context.guard.watch(self, self._run)
            self._start_idle_timer()
            before = row.egress, row.settings.checkpoints
            if (changed.egress, changed.settings.checkpoints) != before:
                await self._begin()

    async def _begin(self) -> None:
        for part in self.parts:
            if self._run is not None:
                await part.begin(self._run)

    async def _start(self) -> Run:
        options, self._pending = self._pending, None
        try:
            started = await self._admit_and_start(options or CheckedOptions())
        except (InvalidOption, NotFound, Forbidden, LimitReached):
            # Refused options are dropped: a retry would fail again.
            raise
        except BaseException:
            later, self._pending = self._pending, options
            if later is not None:
                self.set_options(later)
            raise
        self._row = started.row
        self._context.expirations.set(self.id, started.row.expires_at)
        return started.run

    async def _admit_and_start(self, options: CheckedOptions) -> startup.StartedRun:
        if self._row is not None:
            return await startup.start(self._context, self.id, self._row, options)
        async with self._context.admit(self.id, options) as admitted:
            return await startup.start(self._context, self.id, None, admitted)

    async def _end(self, reason: str, cause: StopCause | None = None) -> None:
        """End the run: kill the jail, notify the parts, update the record. Needs the lock."""
        await self._prepare_end()
        run, self._run = self._run, None
        assert run is not None
        assert self._row is not None
        self._stop_idle_timer()
        # For the next run, if this one ends before there is room.
        if full := await self._context.guard.over_disk(run):
            reason, cause = full, "disk"
        self._context.guard.forget(run)
        await run.jail.kill()
        run.spills.close()
        await self._record_end(self._row, reason, cause)

    async def _prepare_end(self) -> None:
        if self.run is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEFORE_END_SECONDS):
                for part in self.parts:
                    await part.before_end()

    async def _clean_up_dead(self, row: SandboxRow, reason: str) -> None:
        # Before the record says idle: idle sandboxes are not swept again.
        await leftovers.sweep_stopped(
            self._context.storage.directory(row.key), self._context.workers
        )
        await self._record_end(row, reason)

    async def _record_end(
        self, row: SandboxRow, reason: str, cause: StopCause | None = None
    ) -> None:
        self._row = replace(
            row,
            status="destroying" if row.status == "destroying" else "idle",
            jail=None,
            stop_reason=reason,
            stop_cause=cause,
            last_active_at=max(row.last_active_at, self.used_at),
        )
        for part in self.parts:
            await part.ended(reason)
        if row.settings.ephemeral:
            await self._context.remove(row.key)
        if row.status != "destroying":
            # Last: after a crash, nothing cleans up a sandbox that is recorded as idle.
            await self._context.record.write(update(self._row))

    async def _destroy(self) -> None:
        async with self._lock:
            self._pending = None
            await self._load()
            if self._row is not None:
                await self._remove(self._row)

    async def _expire(self) -> None:
        async with self._lock:
            if not self._closed:
                await self._remove_expired()

    async def _remove_expired(self) -> None:
        await self._load()
        row = self._row
        if row is not None and row.expired:
            lifetime = row.settings.lifetime
            _log.info("sandbox %s is destroyed: its lifetime of %g s is over", self.id, lifetime)
            await self._remove(row, EXPIRED)

    async def _remove(self, row: SandboxRow, reason: str = DESTROYED) -> None:
        """Remove everything. Once begun, the only next step is to finish."""
        self._removal_reason = reason
        self._row = replace(row, status="destroying")
        # On a full disk, destroying frees the space that the record needs.
        with contextlib.suppress(StorageFull):
            await self._context.record.write(update(self._row))
        if self._run is not None:
            await self._end(reason)
        elif (jail := await startup.find(self._context, row)) is not None:
            await jail.kill()
        await self._context.remove(row.key)
        await self._context.record.write(delete(SandboxRow, self.id))
        if row.layers:
            self._context.snapshots.spawn(self._context.snapshots.collect())
        self._row = None
        self._context.expirations.set(self.id, None)
        self._on_destroyed()

    async def _has_ended(self, jail: Jail) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await jail.wait()
        return not jail.alive

    def _start_probe(self, jail: Jail) -> None:
        self._spawn(self._probe(jail))

    async def _probe(self, jail: Jail) -> None:
        """End a run whose guest init is stuck, as its callers would wait forever.

        The guest init serves connections in order, so a response to this one shows that all earlier
        calls are being served.
        """
        for _ in range(PROBES):
            try:
                if not jail.frozen:
                    await guest_requests.send_signal(jail, _UNUSED_PID, 0, guest_init.LEADER)
                return
            except SandboxGone:
                if not jail.alive or jail.frozen or not self._is_current(jail):
                    return
        self.stop(UNRESPONSIVE)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                f"the engine of sandbox {self.id} was closed.",
                hint="Open another with Host.open().",
                reason="closed",
                sandbox_id=self.id,
            )

    async def _watch(self, run: Run) -> None:
        """Wait for a run to end by itself, then clean up after it."""
        await run.jail.wait()
        async with self._lock:
            if self._is_current(run.jail):
                await self._end(await self._death_reason(run.jail))

    async def _death_reason(self, jail: Jail) -> str:
        with contextlib.suppress(SmokeboxError, OSError):
            if (await jail.stats()).oom_kills:
                return "it ran out of memory"
        return "its first process was killed"

    async def _stop_reason(self, run: Run) -> str:
        """Return why a run ended, after its end is recorded."""
        async with self._lock:
            if self._is_current(run.jail):
                await self._end(await self._death_reason(run.jail))
            if self._row is None:
                return self._removal_reason
            return self._row.stop_reason or STOPPED

    def _start_idle_timer(self) -> None:
        self._stop_idle_timer()
        if self._active or self._run is None or self._row is None:
            return
        idle_timeout = self._row.settings.idle_timeout
        if idle_timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(idle_timeout, self._idle)

    def _stop_idle_timer(self) -> None:
        self._idle_while_held = False
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _idle(self) -> None:
        self._timer = None
        self._idle_while_held = bool(self._held)
        if self._held:
            return
        if any(part.busy for part in self.parts):
            self._start_idle_timer()
        elif not self._active:
            self._spawn(self._sleep(if_idle=True))

    def _spawn(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run a step to its end, whether or not a caller waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("sandbox %s: a step failed: %s", self.id, error)
