"""Snapshots in the bucket of the server's backups, from where this or another server takes them.

Each layer is an archive, which snapshots share as they share layers: it is named by its digest, as
another server may archive the same layer otherwise. The manifest `ID.json` comes last: without it
there is no snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.backups.archive_store import BucketArchiveStore, parse_manifest
from smokebox.engine.names import check_id, check_snapshot_name, is_snapshot_id
from smokebox.engine.record.rows import (
    SandboxRow,
    SnapshotLayerRow,
    SnapshotRow,
    from_text,
    insert,
    to_text,
)
from smokebox.engine.snapshots.capture import check_room
from smokebox.engine.snapshots.snapshots import name_taken, snapshot_of
from smokebox.engine.workers import Job, checkpoint
from smokebox.errors import (
    BadSnapshot,
    Conflict,
    ImageError,
    InvalidOption,
    NotFound,
    PathNotFound,
    Unsupported,
)
from smokebox.foundation.ids import new_id
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.context import EngineContext
    from smokebox.engine.images.layer_store import StoredLayer
    from smokebox.types import Snapshot

FORMAT = {"format": "smokebox-snapshot", "version": 1}
MAX_MANIFEST = 16 << 20

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LAYER = re.compile(r"upper-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedLayer:
    """A layer in the bucket, and the digest of its archive before compression."""

    row: SnapshotLayerRow
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedSnapshot:
    """A snapshot in the bucket, and its layers, the uppermost first."""

    row: SnapshotRow
    layers: tuple[ArchivedLayer, ...]


class SnapshotArchives:
    """Exports snapshots of a host to its bucket, and imports them from there."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._snapshots = context.snapshots
        self._store = context.snapshots.store
        self._record = context.record

    async def export(self, row: SnapshotRow) -> Snapshot:
        """Put a snapshot into the bucket. Safe to repeat.

        Raises:
            Unsupported: The server has no bucket.
        """
        bucket = _bucket(self._context.backups)
        with self._snapshots.pinned(row.layers):
            if not self._snapshots.complete(row.layers):
                raise self._snapshots.missing(row.name or row.id)
            rows = {one.id: one for one in await self._record.snapshot_layers()}
            layers = []
            for layer in self._snapshots.layers(row.layers):
                digest = await self._upload(bucket, layer)
                stored = replace(rows[layer.id], merged=())
                layers.append({"row": to_text(stored), "digest": digest})
            manifest = {**FORMAT, "snapshot": to_text(row), "layers": layers}
            await bucket.put(f"{row.id}.json", json.dumps(manifest).encode())
        return snapshot_of(row)

    async def find(self, id: str) -> ArchivedSnapshot:
        """Return a snapshot in the bucket.

        Raises:
            NotFound: There is no such snapshot.
            BadSnapshot: Its manifest is damaged.
        """
        bucket = _bucket(self._context.backups)
        data = await bucket.read(f"{id}.json", MAX_MANIFEST) if is_snapshot_id(id) else None
        if data is None:
            raise NotFound(
                f"{bucket.place} has no snapshot {id!r:.200}.",
                hint="Pass the id of a snapshot that was exported there.",
                kind="snapshot",
                name=id,
            )
        return _decode(data, id)

    async def load(
        self, found: ArchivedSnapshot, *, name: str | None = None, scope: str = ""
    ) -> Snapshot:
        """Take a snapshot from the bucket. Layers that are here already are not loaded.

        Args:
            found: The snapshot.
            name: Its name here; by default the one that it had.
            scope: Prefix of the sandbox ids among which the name is unique.

        Raises:
            Conflict: The snapshot is here, or its name is taken.
            NotFound: Its image is not on this host.
            BadSnapshot: A layer is damaged.
        """
        # The retention of checkpoints is no concern of one that a user imports.
        row = replace(found.row, scope=scope, parent=None, origin="user")
        if name is not None:
            row = replace(row, name=check_snapshot_name(name))
        await self._check(row)
        bucket = _bucket(self._context.backups)
        image = await self._context.images.get(row.image, scope=row.sandbox_id, digest=row.digest)
        with self._store.lease(), self._snapshots.pinned(row.layers):
            loaded: list[SnapshotLayerRow] = []
            try:
                for number, layer in reversed(list(enumerate(found.layers))):
                    if await self._is_here(layer.row.id):
                        continue
                    await self._check_room(row.sandbox_id, layer.row.size)
                    target = layer.row.target
                    below = [one.row.id for one in found.layers[number + 1 :]]
                    stack = [one.at() for one in self._snapshots.layers(below)]
                    paths = [one.path for one in (*stack, *image.layers) if one.target == target]
                    loaded.append(layer.row)
                    with _layer_errors(layer, bucket.place):
                        chunks = bucket.chunks(_key(layer.digest))
                        await self._store.unpack_written(
                            chunks, layer.row, digest=layer.digest, below=paths
                        )
                async with self._context.catalog.recording():
                    await self._record.write(*map(insert, loaded), insert(row))
            except BaseException:
                await run_to_completion(self._snapshots.discard([one.id for one in loaded]))
                raise
        await self._record.flush()
        return snapshot_of(row)

    async def _check(self, row: SnapshotRow) -> None:
        if await self._record.get(SnapshotRow, row.id) is not None:
            raise Conflict(
                f"the snapshot {row.id} is here already.",
                hint="Use it, or delete it first.",
                kind="snapshot",
                name=row.id,
            )
        named = row.name is not None and await self._record.snapshot_by_name(row.scope, row.name)
        if row.name is not None and named:
            raise name_taken(row.name)

    async def _is_here(self, id: str) -> bool:
        known = await self._record.get(SnapshotLayerRow, id)
        return known is not None and self._snapshots.complete([id])

    async def _check_room(self, sandbox_id: str, size: int) -> None:
        used = await self._snapshots.stored(sandbox_id)
        sandbox = await self._record.get(SandboxRow, sandbox_id)
        if sandbox is not None:
            used += await self._context.measure(sandbox.key)
        limit = sandbox.limits.disk if sandbox is not None else None
        check_room(self._context.home.path, size, used=used, limit=limit)

    async def _upload(self, bucket: BucketArchiveStore, layer: StoredLayer) -> str:
        """Upload a layer that the bucket lacks, and return the digest of its plain archive."""
        part = self._context.backups.folder.part(f"{layer.id}.{new_id()}")
        try:
            digest = await self._snapshots.workers.run(Job(), self._pack, layer, part)
            size = (await asyncio.to_thread(os.stat, part)).st_size
            if await bucket.size(_key(digest)) != size:
                await bucket.upload(_key(digest), part)
        finally:
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(os.unlink, part)
        return digest

    def _pack(self, layer: StoredLayer, part: str) -> str:
        import zstandard

        self._context.backups.folder.check_room(layer.bytes or 0)
        digest = hashlib.sha256()
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with (
            open(descriptor, "wb") as file,
            zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as writer,
            contextlib.closing(self._store.archive(layer)) as chunks,
        ):
            for chunk in chunks:
                checkpoint()
                digest.update(chunk)
                writer.write(chunk)
        return f"sha256:{digest.hexdigest()}"


def _bucket(backups: Backups) -> BucketArchiveStore:
    if not isinstance(backups.store, BucketArchiveStore):
        raise Unsupported(
            "this server has no bucket, so it exports and imports no snapshots.",
            hint="Start it with --backups s3://BUCKET/PREFIX.",
            operation="export of snapshots",
        )
    return backups.store


def _key(digest: str) -> str:
    return f"layers/{digest.removeprefix('sha256:')}.tar.zst"


@contextlib.contextmanager
def _layer_errors(layer: ArchivedLayer, place: str) -> Iterator[None]:
    """Translate errors about the archive of a layer."""
    key = f"{place}/{_key(layer.digest)}"
    try:
        yield
    except PathNotFound as error:
        raise BadSnapshot(
            f"a layer of the snapshot is missing: {key}.",
            hint="Export the snapshot again.",
            kind="layer",
            name=layer.row.id,
        ) from error
    except ImageError as error:
        raise BadSnapshot(
            f"a layer of the snapshot is damaged, {key}: {error.message}",
            hint="Delete it there, and export the snapshot again.",
            kind="layer",
            name=layer.row.id,
        ) from error


def _decode(data: bytes, id: str) -> ArchivedSnapshot:
    try:
        manifest = parse_manifest(data, FORMAT)
        # Manifests from before there were checkpoints have no origin.
        row = from_text(SnapshotRow, {"origin": "user", **manifest["snapshot"]})
        check_id(row.sandbox_id)
        layers = tuple(
            ArchivedLayer(row=from_text(SnapshotLayerRow, one["row"]), digest=one["digest"])
            for one in manifest["layers"]
        )
        valid = row.id == id and row.status == "ready"
        valid = valid and row.layers == tuple(one.row.id for one in layers)
        if not valid or not all(map(_is_valid, layers)):
            raise ValueError("its parts do not fit")
    except (ValueError, TypeError, KeyError, AttributeError, InvalidOption) as error:
        raise BadSnapshot(
            f"the manifest of the snapshot {id} in the bucket is damaged ({error}).",
            hint="Export the snapshot again.",
            kind="snapshot",
            name=id,
        ) from error
    return ArchivedSnapshot(row=row, layers=layers)


def _is_valid(layer: ArchivedLayer) -> bool:
    row = layer.row
    return bool(
        _LAYER.fullmatch(row.id)
        and _DIGEST.fullmatch(layer.digest)
        and row.target.startswith("/")
        and row.size >= 0
    )
