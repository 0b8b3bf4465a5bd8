"""Snapshots of one sandbox, its return to one, and sandboxes that go on from its state."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.names import check_snapshot_name
from smokebox.engine.record.rows import (
    SandboxRow,
    SnapshotRow,
    delete,
    insert,
    put,
    update,
)
from smokebox.engine.run import RunPart
from smokebox.engine.snapshots.capture_job import CapturedState, CaptureJob, Unchanged
from smokebox.engine.snapshots.snapshots import (
    check_description,
    random_snapshot_id,
    snapshot_of,
)
from smokebox.engine.snapshots.tree_index import TICK_NS
from smokebox.errors import Conflict, NotFound, SandboxGone, SmokeboxError
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from smokebox.engine.context import EngineContext
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.record.rows import SnapshotLayerRow
    from smokebox.engine.run import Run
    from smokebox.engine.snapshots.retention import Retention
    from smokebox.limits import Limits
    from smokebox.types import Snapshot, SnapshotDiff, SnapshotOrigin

RESTORED = "it was restored to a snapshot"


class SandboxSnapshots(RunPart):
    """Makes snapshots of one sandbox, one at a time.

    `quiet` keeps the engine itself from replacing directories meanwhile, and `flush` waits until
    the states of sessions are in the record.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        context: EngineContext,
        *,
        quiet: asyncio.Lock,
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        self._lifecycle = lifecycle
        self._context = context
        self._snapshots = context.snapshots
        self._quiet = quiet
        self._flush = flush
        self._lock = asyncio.Lock()
        self._working = 0

    @property
    def busy(self) -> bool:
        """True while a snapshot is made."""
        return self._working > 0

    async def create(
        self,
        name: str | None = None,
        *,
        description: str | None = None,
        labels: Mapping[str, str] | None = None,
        id: str | None = None,
        scope: str = "",
        retention: Retention | None = None,
        origin: SnapshotOrigin = "user",
        if_changed: bool = False,
    ) -> Snapshot:
        """Make a snapshot of all files of the sandbox. It outlives the sandbox.

        A sandbox that runs keeps running: its programs are frozen for some milliseconds. One that
        sleeps is not woken. File systems in memory and mounted buckets are not included.

        Args:
            name: A name that is free in the scope; by default it has only an id.
            description: A text for people.
            labels: Labels to add to those of the sandbox.
            id: Id of the snapshot; by default a random one.
            scope: Prefix of the sandbox ids among which the name is unique.
            retention: Then remove earlier ones of the sandbox and origin that it does not keep.
            origin: Why it is made.
            if_changed: Return the latest one of that origin if it shows the present state.

        Raises:
            NotFound: The sandbox does not exist.
            Conflict: The name is taken.
            LimitReached: The sandbox and its snapshots use as much disk as it may.
        """
        making = replace(
            self._unfinished(await self.row(), id),
            scope=scope,
            name=None if name is None else check_snapshot_name(name),
            description=check_description(description),
            origin=origin,
        )
        async with self._lock:
            latest = None
            if if_changed:
                # What was written before is told from later writes in the same clock tick.
                await asyncio.sleep(TICK_NS / 1e9)
                latest = await self._snapshots.latest(self._lifecycle.id, origin)
            try:
                made = await self._make(
                    making,
                    labels or {},
                    functools.partial(self._capture_running_or_asleep, lasting=True),
                    known=None if latest is None else latest.layers,
                )
            except Unchanged:
                assert latest is not None
                made = latest
        if retention is not None:
            await self.prune(retention, origin=origin)
        return snapshot_of(made)

    async def checkpoint(self, id: str, run: Run, retention: Retention) -> Snapshot | None:
        """Make a snapshot of the origin "interval", unless nothing changed since the last one.

        Args:
            id: Id of the snapshot.
            run: The current run. Neither a call nor another run is begun for it.
            retention: Then remove earlier ones that it does not keep.

        Raises:
            SandboxGone: The run ended meanwhile.
        """

        async def capture(
            commit: Callable[[CapturedState], Awaitable[None]], known: tuple[str, ...] | None
        ) -> None:
            await self._flush()
            # A call may have changed it.
            current = await self.row()
            job = CaptureJob(self._context, current, run, lasting=True, moved=[], known=known)
            await job.run(commit)

        async with self._lock:
            await asyncio.sleep(TICK_NS / 1e9)
            row = await self.row()
            latest = await self._snapshots.latest(row.id, "interval")
            making = replace(self._unfinished(row, id), origin="interval")
            known = row.layers if latest is None else latest.layers
            try:
                made = await self._make(making, {}, capture, known=known)
            except Unchanged:
                return None
        await self.prune(retention, origin="interval")
        return snapshot_of(made)

    async def _make(
        self,
        making: SnapshotRow,
        labels: Mapping[str, str],
        capture: Callable[
            [Callable[[CapturedState], Awaitable[None]], tuple[str, ...] | None], Awaitable[None]
        ],
        *,
        known: tuple[str, ...] | None,
    ) -> SnapshotRow:
        """Make a snapshot. Raises `Unchanged` if the layers `known` show the present state."""
        found: list[SnapshotRow] = []

        async def commit(state: CapturedState) -> None:
            ready = await self._complete(making, state, labels)
            await self._snapshots.record.write(*state.changes, update(ready))
            found.append(ready)

        await self._capture(making, lambda: capture(commit, known))
        self._snapshots.shorten(making.sandbox_id, found[0].layers)
        return found[0]

    async def prune(
        self, retention: Retention, *, origin: SnapshotOrigin | None = None
    ) -> list[Snapshot]:
        """Remove the snapshots of the sandbox that are not kept, and return them."""
        return await self._snapshots.prune(self._lifecycle.id, retention, origin=origin)

    async def outdated(
        self, retention: Retention, *, origin: SnapshotOrigin | None = None, upcoming: int = 0
    ) -> set[str]:
        """Return the ids of snapshots of the sandbox that are not kept; see `Retention`."""
        rows = await self._snapshots.record.snapshots(sandbox_id=self._lifecycle.id)
        return {row.id for row in retention.outdated(rows, origin=origin, upcoming=upcoming)}

    async def restore(
        self, snapshot: str, *, save_as: str | None = None, scope: str = ""
    ) -> Snapshot:
        """Replace all files of the sandbox by those of a snapshot, or none if that fails.

        Its run ends, and the next call starts another. Its settings and sessions stay.

        Args:
            snapshot: Id or name of a snapshot of this or another sandbox, of the same image.
            save_as: Make a snapshot of this name of the present state first.
            scope: Prefix of the sandbox ids whose snapshots are found by name.

        Raises:
            NotFound: There is no such snapshot, or the sandbox does not exist.
            Conflict: The snapshot is of another image.
        """
        target = await self._snapshots.row(snapshot, scope=scope)
        row = await self.row()
        if row.image != target.image:
            raise Conflict(
                f"snapshot {target.name or target.id} is of the image {target.image!r}, and the "
                f"sandbox {row.id} of {row.image!r}.",
                hint="Create another sandbox with snapshot=.",
                kind="image",
                name=target.image,
            )
        if save_as is not None:
            await self.create(save_as, scope=scope)

        async def swap(row: SandboxRow) -> SandboxRow:
            # From here on it happens, if need be when the sandbox is used next.
            changed = replace(row, layers=target.layers, pending="discard")
            await self._snapshots.record.write(update(changed))
            try:
                return await self._snapshots.settle(changed)
            except (SmokeboxError, OSError):
                return changed

        with self._snapshots.pinned(target.layers):
            if not self._snapshots.complete(target.layers):
                raise self._snapshots.missing(snapshot)
            async with self._lock, self._quiet:
                await self._lifecycle.change_files(swap, reason=RESTORED)
        await self._snapshots.collect()
        return snapshot_of(target)

    async def fork(
        self, limits: Mapping[str, Limits], *, group: str | None = None
    ) -> list[SandboxRow]:
        """Record sandboxes that go on from the present state: all or none. They start when used.

        They have the image, egress policy, environment, labels and settings of this one, and
        sessions in the same directories with the same variables. They have no processes, exposed
        ports or mounts.

        Args:
            limits: Limits of the new sandboxes by their ids.
            group: Group of the new sandboxes (see `RunSettings`); by default that of this one.

        Raises:
            Conflict: An id is taken.
        """
        forks: list[SandboxRow] = []

        async def commit(state: CapturedState) -> None:
            forks.extend(self._fork_of(state, id, limits[id], group) for id in limits)
            sessions = [
                put(replace(session, sandbox_id=fork.id))
                for fork in forks
                for session in state.sessions
            ]
            inserts = [insert(fork) for fork in forks]
            await self._snapshots.record.write(
                *state.changes, *inserts, *sessions, delete(SnapshotRow, making.id)
            )

        row = await self.row()
        making = self._unfinished(row)
        async with self._lock:
            await self._capture(making, lambda: self._capture_running_or_asleep(commit))
        self._snapshots.shorten(row.id, forks[0].layers)
        return forks

    async def diff(
        self, before: str, after: str | None = None, *, texts: bool = False, scope: str = ""
    ) -> SnapshotDiff:
        """Compare two snapshots, or one with the present state of the sandbox.

        Args:
            before: Id or name of the earlier snapshot.
            after: Id or name of the later one; by default the present state.
            texts: Return the changed lines of text files too.
            scope: Prefix of the sandbox ids whose snapshots are found by name.
        """
        first = await self._snapshots.row(before, scope=scope)
        if after is not None:
            second = await self._snapshots.row(after, scope=scope)
            return await self._snapshots.diff(first, second, texts=texts)
        present: list[SnapshotRow] = []
        with contextlib.ExitStack() as stack:

            async def keep(state: CapturedState) -> None:
                stack.enter_context(self._snapshots.pinned(state.layers))
                # Recorded, so that the next snapshot can be stacked on them.
                await self._snapshots.record.write(*state.changes, delete(SnapshotRow, making.id))
                present.append(replace(making, layers=state.layers))

            making = self._unfinished(await self.row())
            async with self._lock:
                await self._capture(making, lambda: self._capture_running_or_asleep(keep))
            found = await self._snapshots.diff(first, present[0], texts=texts)
        await self._snapshots.collect()
        return found

    async def adopt(self, run: Run) -> None:
        """Take over a run of another engine, which may have left it frozen."""
        if run.id in self._snapshots.interrupted:
            self._snapshots.interrupted.discard(run.id)
            await run.jail.thaw()

    def _unfinished(self, row: SandboxRow, id: str | None = None) -> SnapshotRow:
        """Return a row that marks a capture which is under way."""
        return SnapshotRow(
            id=id or random_snapshot_id(),
            sandbox_id=row.id,
            scope="",
            name=None,
            description="",
            status="making",
            parent=None,
            image=row.image,
            digest=row.digest,
            tier=row.tier,
            layers=(),
            created_at=time.time(),
        )

    async def row(self) -> SandboxRow:
        """Return the row of the sandbox. Raises `NotFound`."""
        row = await self._lifecycle.row()
        if row is None or row.status == "destroying":
            raise NotFound(
                f"there is no sandbox {self._lifecycle.id!r}: it was destroyed, or never started.",
                hint="Create it first, for example with wake().",
                kind="sandbox",
                name=self._lifecycle.id,
            )
        return row

    async def _complete(
        self, making: SnapshotRow, state: CapturedState, labels: Mapping[str, str]
    ) -> SnapshotRow:
        row = state.row
        return replace(
            making,
            status="ready",
            parent=await self._parent(state),
            layers=state.layers,
            size=sum(one.size for one in state.made),
            files=sum(one.files for one in state.made),
            limits=row.limits,
            env=row.env,
            labels={**row.labels, **labels},
            settings=row.settings,
            egress=row.egress,
            sessions=state.sessions,
        )

    async def _parent(self, state: CapturedState) -> str | None:
        """Return the latest snapshot that the state is stacked on."""
        below = state.layers[len(state.made) :]
        for one in reversed(await self._snapshots.record.snapshots()):
            if one.status == "ready" and one.layers and one.layers == below:
                return one.id
        return state.row.snapshot or None

    def _fork_of(
        self, state: CapturedState, id: str, limits: Limits, group: str | None
    ) -> SandboxRow:
        at, settings = time.time(), state.row.settings
        return replace(
            state.row,
            id=id,
            key=self._context.key(),
            created_at=at,
            last_active_at=at,
            status="idle",
            generation=0,
            limits=limits,
            settings=settings if group is None else replace(settings, group=group),
            jail=None,
            stop_reason=None,
            stop_cause=None,
            layers=state.layers,
            pending="",
        )

    async def _capture(self, making: SnapshotRow, capture: Callable[[], Awaitable[None]]) -> None:
        """Call `capture` while the record has the row."""
        self._working += 1
        await self._snapshots.reserve(making)
        try:
            async with self._quiet:
                await capture()
        except BaseException:
            await run_to_completion(self._snapshots.release(making))
            raise
        finally:
            self._working -= 1

    async def _capture_running_or_asleep(
        self,
        commit: Callable[[CapturedState], Awaitable[None]],
        known: tuple[str, ...] | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        """Capture the state, and pass it to `commit`, which puts its layer into the record.

        It is `lasting` if it becomes a snapshot.
        """
        moved: list[SnapshotLayerRow] = []
        failures: list[Exception] = []

        def job(row: SandboxRow, run: Run | None) -> CaptureJob:
            return CaptureJob(self._context, row, run, lasting=lasting, moved=moved, known=known)

        async def move(row: SandboxRow) -> SandboxRow:
            return await job(row, None).move(failures)

        async def capture(row: SandboxRow) -> SandboxRow:
            await job(row, None).run(commit)
            return row

        while True:
            run = self._lifecycle.run
            if run is None:
                await self._lifecycle.change_files(move)
                if failures:
                    raise failures[0]
                if await self._lifecycle.change_files(capture):
                    return
                continue
            try:
                async with self._lifecycle.use() as current:
                    row = await self.row()
                    await self._flush()
                    await job(row, current).run(commit)
                    return
            except SandboxGone:
                # It fell asleep meanwhile, and is captured as it is then.
                await self.row()
                if self._lifecycle.run is not None:
                    raise
