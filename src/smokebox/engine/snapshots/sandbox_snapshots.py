"""Snapshots of one sandbox, its return to one, and sandboxes that go on from its state."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine.backups.restore import frozen
from smokebox.engine.names import check_snapshot_name
from smokebox.engine.record.rows import (
    SandboxRow,
    SessionRow,
    SnapshotLayerRow,
    SnapshotRow,
    delete,
    insert,
    put,
    update,
)
from smokebox.engine.run import RunPart
from smokebox.engine.snapshots.capture import Capture, CaptureState, check_room, load_state
from smokebox.engine.snapshots.snapshots import (
    check_description,
    random_snapshot_id,
    snapshot_of,
)
from smokebox.engine.workers import Job
from smokebox.errors import Conflict, NotFound, SandboxGone
from smokebox.foundation.ids import new_global_id
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from smokebox.engine.context import EngineContext
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.run import Run
    from smokebox.limits import Limits
    from smokebox.types import Snapshot, SnapshotDiff

T = TypeVar("T")

RESTORED = "it was restored to a snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxState:
    """The captured state of a sandbox: the layers that show it, and the row that has the rest.

    `layer` is the one that was made for it, or None if nothing had changed.
    """

    row: SandboxRow
    layers: tuple[str, ...]
    sessions: tuple[SessionRow, ...]
    layer: SnapshotLayerRow | None


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

        Raises:
            NotFound: The sandbox does not exist.
            Conflict: The name is taken.
            LimitReached: The sandbox and its snapshots use as much disk as it may.
        """
        row = await self.row()
        making = SnapshotRow(
            id=id or random_snapshot_id(),
            sandbox_id=row.id,
            scope=scope,
            name=None if name is None else check_snapshot_name(name),
            description=check_description(description),
            status="making",
            parent=None,
            image=row.image,
            digest=row.digest,
            tier=row.tier,
            layers=(),
            created_at=time.time(),
        )
        found: list[SnapshotRow] = []

        async def commit(state: SandboxState) -> None:
            ready = await self._complete(making, state, labels or {})
            changes = (
                [update(ready)] if state.layer is None else [insert(state.layer), update(ready)]
            )
            await self._snapshots.record.write(*changes)
            found.append(ready)

        async with self._lock:
            await self._capture(making, commit, lasting=True)
        self._snapshots.shorten(found[0])
        return snapshot_of(found[0])

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
            # From here on it happens, if need be when the next engine starts.
            changed = replace(row, layers=target.layers, pending="discard")
            await self._snapshots.record.write(update(changed))
            return await self._snapshots.settle(changed)

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

        async def commit(state: SandboxState) -> None:
            forks.extend(self._fork_of(state, id, limits[id], group) for id in limits)
            sessions = [
                put(replace(session, sandbox_id=fork.id))
                for fork in forks
                for session in state.sessions
            ]
            layer = [] if state.layer is None else [insert(state.layer)]
            await self._snapshots.record.write(
                *layer, *(insert(fork) for fork in forks), *sessions, delete(SnapshotRow, making.id)
            )

        row = await self.row()
        making = self._temporary(row)
        async with self._lock:
            await self._capture(making, commit)
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
        found: list[SnapshotDiff] = []

        async def compare(state: SandboxState) -> None:
            if state.layer is not None:
                # Recorded, so that the next snapshot can be stacked on it.
                await self._snapshots.record.write(insert(state.layer))
            present = replace(making, layers=state.layers)
            try:
                found.append(await self._snapshots.diff(first, present, texts=texts))
            finally:
                await self._snapshots.release(making)

        row = await self.row()
        making = self._temporary(row)
        async with self._lock:
            await self._capture(making, compare)
        await self._snapshots.collect()
        return found[0]

    async def adopt(self, run: Run) -> None:
        """Take over a run of another engine, which may have left it frozen."""
        if run.id in self._snapshots.interrupted:
            self._snapshots.interrupted.discard(run.id)
            await run.jail.thaw()

    def _temporary(self, row: SandboxRow) -> SnapshotRow:
        """Return a row that marks a capture which is under way, and becomes no snapshot."""
        return SnapshotRow(
            id=random_snapshot_id(),
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
        self, making: SnapshotRow, state: SandboxState, labels: Mapping[str, str]
    ) -> SnapshotRow:
        row = state.row
        return replace(
            making,
            status="ready",
            parent=await self._parent(state),
            layers=state.layers,
            size=state.layer.size if state.layer is not None else 0,
            files=state.layer.files if state.layer is not None else 0,
            limits=row.limits,
            env=row.env,
            labels={**row.labels, **labels},
            settings=row.settings,
            egress=row.egress,
            sessions=state.sessions,
        )

    async def _parent(self, state: SandboxState) -> str | None:
        """Return the latest snapshot that the state is stacked on."""
        below = state.layers if state.layer is None else state.layers[1:]
        for one in reversed(await self._snapshots.record.snapshots()):
            if one.status == "ready" and one.layers and one.layers == below:
                return one.id
        return state.row.snapshot or None

    def _fork_of(
        self, state: SandboxState, id: str, limits: Limits, group: str | None
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

    async def _capture(
        self,
        making: SnapshotRow,
        commit: Callable[[SandboxState], Awaitable[None]],
        *,
        lasting: bool = False,
    ) -> None:
        """Capture the state, and pass it to `commit`, which puts its layer into the record.

        It is `lasting` if it becomes a snapshot.
        """
        self._working += 1
        await self._snapshots.reserve(making)
        try:
            async with self._quiet:
                await self._capture_running_or_asleep(commit, lasting=lasting)
        except BaseException:
            await run_to_completion(self._snapshots.release(making))
            raise
        finally:
            self._working -= 1

    async def _capture_running_or_asleep(
        self, commit: Callable[[SandboxState], Awaitable[None]], *, lasting: bool
    ) -> None:
        async def capture(row: SandboxRow) -> SandboxRow:
            await _CaptureJob(self._context, row, None, lasting=lasting).run(commit)
            return row

        while True:
            run = self._lifecycle.run
            if run is None:
                if await self._lifecycle.change_files(capture):
                    return
                continue
            try:
                async with self._lifecycle.use() as current:
                    row = await self.row()
                    await self._flush()
                    await _CaptureJob(self._context, row, current, lasting=lasting).run(commit)
                    return
            except SandboxGone:
                # It fell asleep meanwhile, and is captured as it is then.
                await self.row()
                if self._lifecycle.run is not None:
                    raise


class _CaptureJob:
    """One capture of a sandbox that runs, or with `run` None is kept from waking.

    It is `lasting` if it becomes a snapshot.
    """

    def __init__(
        self, context: EngineContext, row: SandboxRow, run: Run | None, *, lasting: bool
    ) -> None:
        self._context = context
        self._lasting = lasting
        self._snapshots = context.snapshots
        self._row = row
        self._run = run
        self._id = new_global_id("layer")
        self._directory = context.storage.directory(row.key)

    async def run(self, commit: Callable[[SandboxState], Awaitable[None]]) -> None:
        targets = await self._targets()
        if not await asyncio.to_thread(os.path.isdir, f"{self._directory}/data/upper/0"):
            # It never ran, or an ephemeral one fell asleep.
            await commit(await self._state(self._row.layers, None))
            return
        state = await asyncio.to_thread(
            load_state,
            self._directory,
            self._row.layers,
            len(targets),
            self._snapshots.canonical,
            self._snapshots.complete,
        )
        with self._snapshots.pinned((*state.layers, *self._row.layers, self._id)):
            if not self._snapshots.complete(state.layers):
                state = CaptureState(self._row.layers)
            target = await asyncio.to_thread(self._snapshots.folder.begin, self._id)
            capture = Capture(
                uppers=f"{self._directory}/data/upper", target=target, targets=targets, before=state
            )
            try:
                await self._make(capture, commit)
            finally:
                await run_to_completion(asyncio.to_thread(self._close, capture))

    def _close(self, capture: Capture) -> None:
        capture.close()
        self._snapshots.folder.discard(self._id)

    async def _make(
        self, capture: Capture, commit: Callable[[SandboxState], Awaitable[None]]
    ) -> None:
        stored = await self._snapshots.stored(self._row.id)

        def check(capture: Capture) -> None:
            used, limit = capture.used + stored, self._row.limits.disk
            check_room(self._context.home.path, capture.size, used=used, limit=limit)

        def pids() -> list[int]:
            return [] if self._run is None else self._run.jail.pids()

        await self._work(capture.open)
        if self._run is not None:
            await self._work(capture.copy_ahead, pids, check)
        async with frozen(self._run) if self._run is not None else contextlib.nullcontext():
            await self._work(capture.finish, pids, check)
            state = await self._state(capture.before.layers, None)
            if self._run is not None and not self._run.jail.alive:
                # Its files are removed, or about to be.
                raise self._run.gone("it ended during the snapshot")
        if capture.empty:
            await commit(state)
            return
        await self._work(capture.flush)
        await self._work(self._snapshots.folder.complete, self._id, capture.changed)
        layers = (self._id, *capture.before.layers)
        layer = SnapshotLayerRow(
            id=self._id,
            sandbox_id=self._row.id,
            size=capture.size,
            files=capture.files,
            created_at=time.time(),
        )
        try:
            await commit(replace(state, layers=layers, layer=layer))
        except BaseException:
            await run_to_completion(self._snapshots.discard(self._id))
            raise
        with contextlib.suppress(OSError):
            # Without it, the next one copies all files.
            save = functools.partial(capture.save, lasting=self._lasting)
            await self._work(save, self._directory, self._row.layers, layers)
        self._context.guard.set_stored(self._row.id, stored + layer.size)
        disk = await self._snapshots.disk_limit(self._row.id, self._row.limits.disk)
        await asyncio.to_thread(self._context.storage.confine, self._row.key, disk)

    async def _work(self, work: Callable[..., T], *args: object) -> T:
        return await self._snapshots.workers.run(Job(), work, *args)

    async def _state(self, layers: tuple[str, ...], layer: SnapshotLayerRow | None) -> SandboxState:
        sessions = await self._snapshots.record.rows(SessionRow, self._row.id)
        return SandboxState(row=self._row, layers=layers, sessions=tuple(sessions), layer=layer)

    async def _targets(self) -> list[str]:
        if self._run is not None:
            image = self._run.image
        else:
            row = self._row
            image = await self._context.images.get(row.image, scope=row.id, digest=row.digest)
        return sorted({layer.target for layer in image.layers})
