"""One capture of the state of a sandbox, as layers of the store and a row that has the rest."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine.backups.restore import frozen
from smokebox.engine.disk import flush_filesystem
from smokebox.engine.record.rows import SessionRow, SnapshotLayerRow, insert, update
from smokebox.engine.snapshots.capture import (
    Capture,
    CaptureState,
    check_room,
    load_state,
)
from smokebox.engine.workers import Job
from smokebox.errors import SmokeboxError
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from smokebox.engine.context import EngineContext
    from smokebox.engine.record.rows import RowChange, SandboxRow
    from smokebox.engine.run import Run

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """The captured state of a sandbox: the layers that show it, and the row that has the rest.

    `made` are those that were made for it, and `changes` record them.
    """

    row: SandboxRow
    layers: tuple[str, ...]
    sessions: tuple[SessionRow, ...]
    made: tuple[SnapshotLayerRow, ...] = ()
    changes: tuple[RowChange, ...] = ()


class Unchanged(Exception):
    """Raised instead of a capture of the state that the layers `known` show."""


class CaptureJob:
    """One capture of a sandbox that runs, or with `run` None is kept from waking.

    It is `lasting` if it becomes a snapshot. `moved` has the layers that were its upper layers
    until they were moved to the store for this capture. A state that the layers `known` show is not
    captured.
    """

    def __init__(
        self,
        context: EngineContext,
        row: SandboxRow,
        run: Run | None,
        *,
        lasting: bool,
        moved: list[SnapshotLayerRow],
        known: tuple[str, ...] | None = None,
    ) -> None:
        self._context = context
        self._snapshots = context.snapshots
        self._store = context.snapshots.store
        self._record = context.snapshots.record
        self._row = row
        self._run = run
        self._lasting = lasting
        self._moved = moved
        self._known = known
        self._directory = context.storage.directory(row.key)

    async def move(self, failures: list[Exception]) -> SandboxRow:
        """Make the upper layers of a sleeping sandbox layers, without a copy, if that is possible.

        Returns the row of the sandbox after that, also if it fails halfway: the next start of the
        sandbox then completes it.
        """
        row = self._row
        try:
            row = self._row = await self._snapshots.settle(row)
            if not await asyncio.to_thread(self._has_uppers):
                return row
            bases = await self._bases()
            state = await self._load_state(bases)
            if state.indexes is not None or not await asyncio.to_thread(self._is_movable):
                return row
            made = await self._work(self._find_movable, bases)
            await self._check_room(sum(one.size for one in made))
            with self._store.lease():
                row = replace(row, layers=(*(one.id for one in made), *row.layers), pending="adopt")
                async with self._snapshots.catalog.recording():
                    await self._record.write(*(insert(one) for one in made), update(row))
                await self._record.flush()
                row = await self._snapshots.settle(row)
            self._moved[:] = made
        except (SmokeboxError, OSError) as error:
            failures.append(error)
        return row

    async def run(self, commit: Callable[[CapturedState], Awaitable[None]]) -> None:
        """Capture the state, and call `commit` to put it into the record.

        Raises `Unchanged` if it is the known one.
        """
        if not await asyncio.to_thread(self._has_uppers):
            # It never ran, or an ephemeral one fell asleep, or they were moved.
            self._check_unknown(self._row.layers)
            found = await self._state(self._row.layers)
            ids = tuple(one.id for one in self._moved)
            if found.layers[: len(ids)] == ids:
                found = replace(found, made=tuple(self._moved))
            with self._snapshots.pinned(found.layers):
                await self._commit(commit, found)
            return
        bases = await self._bases()
        state = await self._load_state(bases)
        pinned = self._snapshots.pinned((*state.layers, *self._row.layers))
        with pinned, self._store.lease():
            if not self._snapshots.complete(state.layers):
                state = CaptureState(self._row.layers)
            capture = self._capture(bases, state)
            try:
                await self._make(capture, commit)
            finally:
                await self._snapshots.workers.finish(capture.close)

    async def _make(
        self, capture: Capture, commit: Callable[[CapturedState], Awaitable[None]]
    ) -> None:
        stored = await self._snapshots.stored(self._row.id)

        def check(capture: Capture) -> None:
            limit = self._row.limits.disk
            used = stored + capture.used() if limit is not None else 0
            check_room(self._context.home.path, capture.size, used=used, limit=limit)

        def pids() -> list[int]:
            return [] if self._run is None else self._run.jail.pids()

        await self._work(capture.open)
        if self._run is not None:
            await self._work(capture.copy_ahead, pids, check)
            # Nothing is frozen to find that nothing has changed.
            self._check_changed(capture)
            if self._run.jail.state.tier == "namespaces":
                root = self._run.jail.root
                await self._work(capture.follow, root, pids, check)
        state = await self._state(capture.before.layers)
        complete = False
        while not complete:
            async with frozen(self._run) if self._run is not None else contextlib.nullcontext():
                await self._work(capture.finish, pids, check)
                if self._run is not None and not self._run.jail.alive:
                    # Its files are removed, or about to be.
                    raise self._run.gone("it ended during the snapshot")
            complete = await self._work(capture.complete)
        self._check_changed(capture)
        made = tuple(self._layers(capture))
        layers = (*(one.id for one in made), *state.layers)
        state = replace(state, layers=layers, made=made, changes=tuple(map(insert, made)))
        try:
            for tree, layer in zip(capture.changed, made, strict=True):
                await self._store.place(tree.layer(), layer)
            await self._commit(commit, state)
        except BaseException:
            await run_to_completion(self._snapshots.discard(one.id for one in made))
            raise
        if made:
            await self._remember(capture, layers, stored + sum(one.size for one in made))

    def _check_changed(self, capture: Capture) -> None:
        if all(tree.delta.only_times for tree in capture.trees):
            self._check_unknown(capture.before.layers)

    def _check_unknown(self, layers: tuple[str, ...]) -> None:
        if self._known is not None:
            canonical = self._snapshots.canonical
            if canonical(layers) == canonical(self._known):
                raise Unchanged

    async def _remember(self, capture: Capture, layers: tuple[str, ...], stored: int) -> None:
        with contextlib.suppress(OSError):
            # Without it, the next one copies all files.
            save = functools.partial(capture.save, lasting=self._lasting)
            await self._work(save, self._directory, self._row.layers, layers)
        self._context.guard.set_stored(self._row.id, stored)
        disk = await self._snapshots.disk_limit(self._row.id, self._row.limits.disk)
        await asyncio.to_thread(self._context.storage.confine, self._row.key, disk)

    async def _commit(
        self, commit: Callable[[CapturedState], Awaitable[None]], state: CapturedState
    ) -> None:
        async with self._snapshots.catalog.recording():
            await commit(state)
        await self._record.flush()

    async def _check_room(self, size: int) -> None:
        # So much is copied when programs change the files again.
        used = size + await self._snapshots.stored(self._row.id)
        limit = self._row.limits.disk
        check_room(self._context.home.path, size, used=used, limit=limit)

    def _has_uppers(self) -> bool:
        return os.path.isdir(f"{self._directory}/data/upper/0")

    def _is_movable(self) -> bool:
        if self._context.storage.quota(self._row.key) is not None:
            # The kernel would count them for the sandbox as before.
            return False
        os.makedirs(self._store.directory, exist_ok=True)
        return os.stat(self._directory).st_dev == os.stat(self._store.directory).st_dev

    def _find_movable(self, bases: Mapping[str, str]) -> list[SnapshotLayerRow]:
        """Return the rows of the layers that the upper layers become, after they are flushed."""
        with contextlib.closing(self._capture(bases, CaptureState(()))) as capture:
            capture.open()
            with capture.compared():
                for tree in capture.changed:
                    flush_filesystem(tree.top)
                return self._layers(capture)

    def _capture(self, bases: Mapping[str, str], before: CaptureState) -> Capture:
        uppers = f"{self._directory}/data/upper"
        return Capture(uppers=uppers, bases=bases, before=before, begin=self._store.begin)

    def _layers(self, capture: Capture) -> list[SnapshotLayerRow]:
        at = time.time()
        return [
            SnapshotLayerRow(
                id=self._store.new_layer_id(),
                sandbox_id=self._row.id,
                target=tree.target,
                size=tree.delta.disk,
                files=len(tree.delta.files),
                created_at=at,
            )
            for tree in capture.changed
        ]

    async def _work(self, work: Callable[..., T], *args: object) -> T:
        return await self._snapshots.workers.run(Job(), work, *args)

    async def _state(self, layers: tuple[str, ...]) -> CapturedState:
        sessions = await self._record.rows(SessionRow, self._row.id)
        return CapturedState(row=self._row, layers=layers, sessions=tuple(sessions))

    async def _load_state(self, bases: Mapping[str, str]) -> CaptureState:
        return await asyncio.to_thread(
            load_state,
            self._directory,
            self._row.layers,
            len(bases),
            self._snapshots.canonical,
            self._snapshots.complete,
        )

    async def _bases(self) -> dict[str, str]:
        """Return the directories that the upper layers had their attributes from, by target."""
        if self._run is not None:
            image = self._run.image
        else:
            row = self._row
            image = await self._context.images.get(row.image, scope=row.id, digest=row.digest)
        bases = {layer.target: f"{self._directory}/data/upper" for layer in image.layers}
        own = await asyncio.to_thread(self._snapshots.layers, self._row.layers)
        return bases | {one.target: one.path for one in reversed(own) if one.target in bases}
