"""All snapshots of one host: listed in the record, found by name or id, and removed when unused.

A layer is removed once no snapshot and no sandbox is stacked on it, so a snapshot can be deleted
while sandboxes that were created from it exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.disk import measure
from smokebox.engine.files.descriptors import LIST, closing
from smokebox.engine.files.trees import remove_tree
from smokebox.engine.jail.jail import make_directories
from smokebox.engine.names import check_snapshot_name
from smokebox.engine.record.rows import (
    SandboxRow,
    SnapshotLayerRow,
    SnapshotRow,
    delete,
    insert,
    update,
)
from smokebox.engine.snapshots import layer_merge
from smokebox.engine.snapshots.capture import check_room, forget_state
from smokebox.engine.snapshots.snapshot_diff import DiffSide, compare_stacks
from smokebox.engine.snapshots.tree_copier import copy_top
from smokebox.engine.workers import Job, Workers
from smokebox.errors import Conflict, InvalidOption, NotFound, SmokeboxError
from smokebox.foundation.ids import new_global_id
from smokebox.foundation.tasks import run_to_completion
from smokebox.types import Snapshot, SnapshotDiff

if TYPE_CHECKING:
    import builtins
    from collections.abc import Coroutine, Iterable, Iterator, Sequence

    from smokebox.engine.guard import ResourceGuard
    from smokebox.engine.home import Home
    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.image import Image
    from smokebox.engine.images.layer_store import StoredLayer
    from smokebox.engine.images.store import ImageStore
    from smokebox.engine.record.record import Record
    from smokebox.engine.sandbox_storage import SandboxStorage
    from smokebox.engine.snapshots.retention import Retention
    from smokebox.types import SnapshotOrigin

# More layers of snapshots than these are merged.
MAX_LAYERS = 32
MAX_DESCRIPTION = 1024
# A layer above this share of all is not merged, which would copy too much.
_LARGE = 0.25
# Captures, merges and comparisons keep a CPU busy.
_THREADS = 4

_log = logging.getLogger("smokebox.engine")


def random_snapshot_id() -> str:
    """Return a unique id that cannot be guessed."""
    return new_global_id("snap")


def snapshot_of(row: SnapshotRow) -> Snapshot:
    """Return the public form of a row."""
    return Snapshot(
        id=row.id,
        sandbox_id=row.sandbox_id,
        name=row.name,
        description=row.description,
        parent=row.parent,
        image=row.image,
        labels=row.labels,
        size=row.size,
        files=row.files,
        created_at=row.created_at,
        origin=row.origin,
    )


class Snapshots:
    """The snapshots of a host, including those of destroyed sandboxes.

    `interrupted` has the sandboxes of which a killed engine was making snapshots: it may have left
    them frozen.
    """

    def __init__(
        self,
        record: Record,
        home: Home,
        storage: SandboxStorage,
        images: ImageStore,
        catalog: ImageCatalog,
        guard: ResourceGuard,
    ) -> None:
        self.store = catalog.layer_store
        self.catalog = catalog
        self.workers = Workers(_THREADS)
        self.record = record
        self.interrupted: set[str] = set()
        self._home = home
        self._storage = storage
        self._images = images
        self._guard = guard
        self._merged: dict[str, tuple[str, ...]] = {}
        self._pins: Counter[str] = Counter()
        self._removing: set[str] = set()
        self._collecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def take_over(self) -> None:
        """Finish or undo what a killed engine began."""
        for row in await self.record.snapshots():
            if row.status == "making":
                self.interrupted.add(row.sandbox_id)
                await self.record.write(delete(SnapshotRow, row.id))
        for sandbox in await self.record.pending():
            try:
                await self.settle(sandbox)
            except (SmokeboxError, OSError) as error:
                # The next start of the sandbox tries again.
                _log.warning("the files of sandbox %s are not in place: %s", sandbox.id, error)
        layers = await self.record.snapshot_layers()
        self._merged = {row.id: row.merged for row in layers if row.merged}
        await self.collect()

    async def aclose(self) -> None:
        """Stop background work and the threads."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.workers.close()

    async def list(self, *, sandbox_id: str | None = None, prefix: str = "") -> list[Snapshot]:
        """Return snapshots, oldest first: of all sandboxes, of one, or of ids with a prefix."""
        rows = await self.record.snapshots(sandbox_id=sandbox_id)
        return [
            snapshot_of(row)
            for row in rows
            if row.status == "ready" and row.sandbox_id.startswith(prefix)
        ]

    async def get(self, name: str, *, scope: str = "") -> Snapshot:
        """Return a snapshot by its id, or by its name in a scope. Raises `NotFound`."""
        return snapshot_of(await self.row(name, scope=scope))

    async def row(self, name: str, *, scope: str = "") -> SnapshotRow:
        """Return the row of a snapshot that is complete.

        Args:
            name: Its id, or its name in the scope.
            scope: A prefix of sandbox ids, in which names are unique.
        """
        row = await self.record.snapshot_by_name(scope, name)
        if row is None:
            row = await self.record.get(SnapshotRow, name)
        if row is None or row.status != "ready":
            raise self.missing(name)
        return row

    def missing(self, name: str) -> NotFound:
        """Return the error for a snapshot that does not exist."""
        return NotFound(
            f"there is no snapshot {name!r:.200}: it was deleted, or never existed.",
            hint="List the existing ones with `smokebox snapshot ls`.",
            kind="snapshot",
            name=name,
        )

    async def delete(self, name: str, *, scope: str = "") -> None:
        """Delete a snapshot, if it exists. Sandboxes that were created from it keep their files."""
        try:
            row = await self.row(name, scope=scope)
        except NotFound:
            return
        await self.record.write(delete(SnapshotRow, row.id))
        await self.collect()

    async def prune(
        self, sandbox_id: str, retention: Retention, *, origin: SnapshotOrigin | None = None
    ) -> builtins.list[Snapshot]:
        """Delete snapshots of a sandbox, of one or any origin, that are not kept; return them."""
        rows = await self.record.snapshots(sandbox_id=sandbox_id)
        outdated = retention.outdated(rows, origin=origin)
        if outdated:
            await self.record.write(*(delete(SnapshotRow, row.id) for row in outdated))
            await self.collect()
        return [snapshot_of(row) for row in outdated]

    async def diff(
        self, before: SnapshotRow, after: SnapshotRow, *, texts: bool = False
    ) -> SnapshotDiff:
        """Compare the files of two snapshots of the same image.

        Args:
            before: The earlier one.
            after: The later one.
            texts: Compare the lines of text files too.

        Raises:
            Conflict: They are of different images.
        """
        if before.image != after.image:
            raise Conflict(
                f"the snapshots are of different images, {before.image!r} and {after.image!r}.",
                hint="Compare snapshots of one sandbox and its forks.",
                kind="image",
                name=after.image,
            )
        image = await self._images.get(before.image, digest=before.digest)
        with self.pinned((*before.layers, *after.layers)):
            stacks = [self.layers(row.layers) for row in (before, after)]
            sides = [tuple(layer.at() for layer in one) for one in stacks]
            work = [DiffSide(own=one, base=image.layers) for one in sides]
            return await self.workers.run(Job(), compare_stacks, *work, texts=texts)

    # For the parts of a sandbox and the start of a run.

    def layers(self, ids: Iterable[str]) -> builtins.list[StoredLayer]:
        """Return layers of the store. Raises `NotFound` for one that is gone."""
        found = []
        for id in ids:
            layer = self.store.get(id)
            if layer is None:
                raise NotFound(
                    f"the layer {id} of a snapshot is gone from {self.store.directory}.",
                    hint="Bring the directory back from a copy, or restore another snapshot.",
                    kind="layer",
                    name=id,
                )
            found.append(layer)
        return found

    async def stack(self, image: Image, layers: Sequence[str]) -> Image:
        """Return the image with layers of snapshots on top. Raises `NotFound`."""
        if not layers:
            return image
        targets = {layer.target for layer in image.layers}
        own = [layer.at() for layer in await asyncio.to_thread(self.layers, layers)]
        digest = hashlib.sha256(f"{image.digest} {' '.join(layers)}".encode()).hexdigest()
        kept = [layer for layer in own if layer.target in targets]
        return replace(image, layers=(*kept, *image.layers), digest=digest)

    async def prepare(self, row: SandboxRow, image: Image) -> None:
        """Create the upper layers of a sandbox that has none, like the layer below them."""
        if row.layers:
            directory = self._storage.directory(row.key)
            await asyncio.to_thread(self._prepare, directory, row.layers, image)

    def _prepare(self, directory: str, ids: Sequence[str], image: Image) -> None:
        if os.path.exists(f"{directory}/data/upper/0"):
            return
        targets = sorted({layer.target for layer in image.layers})
        make_directories(directory, len(targets))
        # The uppermost layer of each target comes last.
        for layer in reversed(self.layers(ids)):
            if layer.target in targets:
                number = targets.index(layer.target)
                copy_top(layer.path, f"{directory}/data/upper/{number}")

    def canonical(self, layers: Sequence[str]) -> tuple[str, ...]:
        """Return a stack with merged layers in the place of those that they show."""
        found = tuple(layers)
        for id, parts in self._merged.items():
            if id in self._removing or not set(parts) <= set(found):
                continue
            # Between them there may be layers of other targets.
            found = tuple(id if one == parts[0] else one for one in found if one not in parts[1:])
        return found

    @contextlib.contextmanager
    def pinned(self, layers: Iterable[str]) -> Iterator[None]:
        """Keep layers from removal in the block."""
        ids = list(layers)
        self._pins.update(ids)
        try:
            yield
        finally:
            self._pins.subtract(ids)

    def complete(self, layers: Iterable[str]) -> bool:
        """Return whether all layers exist, and are not being removed."""
        return all(one not in self._removing and self.store.get(one) for one in layers)

    async def latest(self, sandbox_id: str, origin: SnapshotOrigin) -> SnapshotRow | None:
        """Return the last snapshot of a sandbox of that origin."""
        rows = await self.record.snapshots(sandbox_id=sandbox_id)
        found = [row for row in rows if row.origin == origin and row.status == "ready"]
        return found[-1] if found else None

    async def stored(self, sandbox_id: str) -> int:
        """Return the bytes of the layers that were made of a sandbox."""
        return sum(row.size for row in await self.record.snapshot_layers(sandbox_id=sandbox_id))

    async def disk_limit(self, sandbox_id: str, limit: int | None) -> int | None:
        """Return the limit of the upper layers of a sandbox: its snapshots take the rest."""
        if limit is None:
            return None
        # Zero is no limit for a quota of the kernel.
        return max(limit - await self.stored(sandbox_id), 1)

    async def stored_of_destroyed(self, prefix: str) -> int:
        """Return the bytes of the layers of destroyed sandboxes whose ids have a prefix."""
        known = {row.id for row in await self.record.sandboxes(prefix=prefix)}
        return sum(
            row.size
            for row in await self.record.snapshot_layers()
            if row.sandbox_id.startswith(prefix) and row.sandbox_id not in known
        )

    async def settle(self, row: SandboxRow) -> SandboxRow:
        """Finish what `pending` of a sandbox tells, and return its row after that."""
        if row.pending:
            directory = self._storage.directory(row.key)
            if row.pending == "adopt":
                await self._adopt_uppers(row, directory)
            await asyncio.to_thread(_discard_upper, directory)
            row = replace(row, pending="")
            await self.record.write(update(row))
        return row

    async def _adopt_uppers(self, row: SandboxRow, directory: str) -> None:
        image = await self._images.get(row.image, scope=row.id, digest=row.digest)
        targets = sorted({layer.target for layer in image.layers})
        targets_of = {one.id: one.target for one in await self.record.snapshot_layers()}
        for id in row.layers:
            if self.store.get(id) is None:
                upper = f"{directory}/data/upper/{targets.index(targets_of[id])}"
                await self.store.adopt(upper, id=id, owner=0, target=targets_of[id], durable=True)

    async def reserve(self, row: SnapshotRow) -> None:
        """Record that a snapshot is being made, before anything is frozen or written."""
        if row.name is not None:
            check_snapshot_name(row.name)
            if await self.record.snapshot_by_name(row.scope, row.name) is not None:
                raise name_taken(row.name)
        try:
            await self.record.write(insert(row))
        except Conflict as error:
            raise name_taken(row.name or row.id) from error

    async def release(self, row: SnapshotRow) -> None:
        """Forget a snapshot that was not completed."""
        with contextlib.suppress(SmokeboxError):
            await self.record.write(delete(SnapshotRow, row.id))

    async def discard(self, ids: Iterable[str]) -> None:
        """Remove layers that were completed and did not get into the record."""
        for id in ids:
            # Another import may be loading the same one, which is pinned for each.
            if self._pins[id] <= 1 and await self.record.get(SnapshotLayerRow, id) is None:
                await self.store.drop([id])

    async def collect(self) -> None:
        """Remove the layers that no snapshot and no sandbox is stacked on."""
        async with self._collecting:
            stacks = [row.layers for row in await self.record.sandboxes()]
            # A sandbox is stacked on what was merged for it from its next start.
            used = {id for one in stacks for id in (*one, *self.canonical(one))}
            used |= {one for row in await self.record.snapshots() for one in row.layers}
            found = {row.id: row.sandbox_id for row in await self.record.snapshot_layers()}
            unused = [id for id in found if id not in used and self._pins[id] <= 0]
            self._removing.update(unused)
            try:
                if unused:
                    await self.record.write(*(delete(SnapshotLayerRow, id) for id in unused))
                    await self.store.drop(unused)
                for id in unused:
                    self._merged.pop(id, None)
                for sandbox in {found[id] for id in unused}:
                    self._guard.set_stored(sandbox, await self.stored(sandbox))
            except (SmokeboxError, OSError) as error:
                _log.warning("layers of snapshots were not removed: %s", error)
            finally:
                self._removing.difference_update(unused)

    def shorten(self, sandbox_id: str, layers: tuple[str, ...]) -> None:
        """Merge layers of a sandbox in the background if there are too many."""
        if len(layers) > MAX_LAYERS:
            self.spawn(self._shorten(sandbox_id, layers))

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run background work, and log its failure."""
        task = asyncio.create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shorten(self, sandbox_id: str, layers: tuple[str, ...]) -> None:
        with self.pinned(layers):
            if not self.complete(layers):
                return
            rows = {one.id: one for one in await self.record.snapshot_layers()}
            stack = [rows[id] for id in self.canonical(layers) if id in rows]
            if len(stack) > MAX_LAYERS:
                for run in _runs_to_merge(stack):
                    await self._merge(sandbox_id, run)
        for one in await self.record.snapshots():
            shorter = self.canonical(one.layers)
            if shorter != one.layers and one.status == "ready":
                await self.record.write(update(replace(one, layers=shorter)))
        await self.collect()

    async def _merge(self, sandbox_id: str, run: Sequence[SnapshotLayerRow]) -> None:
        id, ids = self.store.new_layer_id(), tuple(one.id for one in run)
        check_room(self._home.path, sum(one.size for one in run), used=0, limit=None)
        trees = [layer.path for layer in self.layers(ids)]
        with self.store.lease(), self.pinned([id]):
            unfinished = await asyncio.to_thread(self.store.begin)
            try:
                await self.workers.run(Job(), layer_merge.write_merged, trees, unfinished.files)
                usage = await asyncio.to_thread(measure, unfinished.files)
                row = SnapshotLayerRow(
                    id=id,
                    sandbox_id=sandbox_id,
                    target=run[0].target,
                    size=usage.bytes,
                    files=usage.inodes,
                    created_at=time.time(),
                    merged=ids,
                )
                await self.store.place(unfinished, row)
                async with self.catalog.recording():
                    await self.record.write(insert(row))
                self._merged[id] = ids
            except BaseException:
                await run_to_completion(self.discard([id]))
                raise
            finally:
                await self.workers.finish(unfinished.close)


def _runs_to_merge(stack: Sequence[SnapshotLayerRow]) -> list[list[SnapshotLayerRow]]:
    """Return runs of small adjacent layers of one target, so that little is copied."""
    total = sum(one.size for one in stack)
    runs: list[list[SnapshotLayerRow]] = []
    for target in sorted({one.target for one in stack}):
        runs.append([])
        for one in stack:
            if one.target == target and one.size > total * _LARGE:
                runs.append([])
            elif one.target == target:
                runs[-1].append(one)
    return [run for run in runs if len(run) > 1]


def _discard_upper(directory: str) -> None:
    forget_state(directory)
    with (
        contextlib.suppress(FileNotFoundError),
        closing(os.open(directory, LIST | os.O_CLOEXEC)) as parent,
    ):
        remove_tree(parent, "data", f"{directory}/data")


async def _logged(work: Coroutine[None, None, None]) -> None:
    try:
        await work
    except (SmokeboxError, OSError) as error:
        _log.warning("background work on snapshots failed: %s", error)


def check_description(text: object) -> str:
    """Return the description of a snapshot, which may be empty."""
    if text is None:
        return ""
    if not isinstance(text, str) or len(text) > MAX_DESCRIPTION:
        raise InvalidOption(
            f"the description of a snapshot is a text of at most {MAX_DESCRIPTION} characters.",
            hint="Shorten it.",
            option="description",
        )
    return text


def name_taken(name: str) -> Conflict:
    """Return the error for a name that another snapshot has."""
    return Conflict(
        f"there is a snapshot {name!r} already.",
        hint="Choose another name, leave it out, or delete that snapshot first.",
        kind="snapshot",
        name=name,
    )
