"""The store of layers: directories that never change once they are complete.

There are two kinds. Layers made from this host are found by a digest of their input (`ensure`).
Layers of images are found by the digest of their unpacked tar archive, and what sandboxes wrote,
in steps of builds and until snapshots, by a random id.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from smokebox.engine.images.chunk_pipe import ChunkPipe
from smokebox.engine.images.layer_folder import (
    LayerFolder,
    PruneResult,
    StoredLayer,
    UnfinishedLayer,
    UnpackLimits,
    check_digest,
    check_media_type,
    dependent_id,
    missing,
)
from smokebox.engine.images.layer_writer import MAX_ID
from smokebox.engine.images.overlay import LowerView
from smokebox.engine.jail.uid_ranges import privileged
from smokebox.engine.workers import Job, JobStopped, Workers, checkpoint
from smokebox.errors import from_os_error
from smokebox.foundation.ids import new_global_id, new_id
from smokebox.foundation.tasks import run_to_completion

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        Callable,
        Collection,
        Generator,
        Iterable,
        Iterator,
        Sequence,
    )

    from smokebox.engine.record.rows import SnapshotLayerRow

__all__ = [
    "LayerStore",
    "PruneResult",
    "StoredLayer",
    "UnfinishedLayer",
    "make_directory",
    "make_file",
]

_UNFINISHED = ".making-"
_ABANDONED_AFTER = 3600.0

MAX_LAYER_BYTES = 64 << 30
MAX_LAYER_FILES = 1_000_000

_THREADS = 8
_CHECK_SECONDS = 0.1
_PACK_CHUNK = 256 << 10


class LayerStore:
    """Layers in `directory`, which several engines may share.

    `home` is the state directory of the engine, which registers the layers that it uses there:
    none of another engine's are removed while its state directory exists.
    """

    def __init__(self, directory: str, *, home: str = "") -> None:
        self.directory = os.path.abspath(directory)
        self._folder = LayerFolder(os.path.join(self.directory, "layers"), home)
        self._keep_owners = privileged()
        self._workers = Workers(_THREADS)
        self._unpacking: dict[tuple[str, ...], asyncio.Future[StoredLayer]] = {}
        self._leases = 0
        self._leased: set[str] = set()

    def find(self, digest: str) -> str | None:
        """Return the directory of a digest, if it exists. Not for layers of images."""
        path = os.path.join(self.directory, digest)
        return path if os.path.isdir(path) else None

    def ensure(self, digest: str, make: Callable[[str], None]) -> str:
        """Return the directory of a digest, filled by `make` if it does not exist.

        If two engines make the same one concurrently, both get the one that was finished first.
        """
        try:
            return self.find(digest) or self._add(digest, make)
        except OSError as error:
            raise from_os_error(error, str(error.filename or self.directory)) from error

    def get(self, id: str) -> StoredLayer | None:
        """Return a complete layer by its id."""
        return self._use(id)

    def find_layer(self, diff_id: str, below: Sequence[str] = ()) -> StoredLayer | None:
        """Return an unpacked layer, if it is complete.

        Args:
            diff_id: Digest of its tar archive.
            below: The diff_ids of the layers below it in the image, the lowest first.
        """
        check_digest(diff_id)
        return self._use(diff_id) or self._use(dependent_id(diff_id, below))

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Keep from `prune` what is unpacked, found or adopted in the block.

        Use it from the first `find_layer` to the `ImageCatalog.put` of the image.
        """
        self._leases += 1
        try:
            yield
        finally:
            self._leases -= 1
            if not self._leases:
                self._leased.clear()

    async def unpack(
        self,
        chunks: AsyncIterable[bytes],
        *,
        media_type: str,
        digest: str,
        diff_id: str,
        below: Sequence[str] = (),
        max_bytes: int = MAX_LAYER_BYTES,
        max_files: int = MAX_LAYER_FILES,
        charge: Callable[[int], None] | None = None,
    ) -> StoredLayer:
        """Unpack the blob of a layer. A failure leaves nothing.

        Layers of one image may be unpacked concurrently if they are begun from the lowest up: one
        whose content depends on those below waits for them. Unpacking a layer that is complete, or
        that another call unpacks, reads none of `chunks`.

        Args:
            chunks: The blob, as the bytes say uncompressed, or compressed by gzip or zstd.
            media_type: Its media type.
            digest: Digest of the blob; empty if only the diff_id is known.
            diff_id: Digest of the uncompressed tar archive.
            below: The diff_ids of the layers below it in the image, the lowest first.
            max_bytes: Size of its files at most.
            max_files: Number of its members at most.
            charge: Called with the bytes that are about to be written; may raise.

        Raises:
            ImageError: The blob is damaged, unsafe, or not what the digests say.
            LimitReached: It has more bytes or members than allowed.
            StorageFull: The disk is full.
        """
        check_media_type(media_type)
        for one in (diff_id, *below, *([digest] if digest else [])):
            check_digest(one)
        key = (diff_id, *below)
        while (other := self._unpacking.get(key)) is not None:
            # If that one fails or is cancelled, this one is next.
            await asyncio.wait([other])
            if not other.cancelled() and other.exception() is None:
                return other.result()
        if (found := self.find_layer(diff_id, below)) is not None:
            return found
        self._keep(diff_id)
        self._keep(dependent_id(diff_id, below))
        done: asyncio.Future[StoredLayer] = asyncio.get_running_loop().create_future()
        self._unpacking[key] = done
        limits = UnpackLimits(bytes=max_bytes, files=max_files, charge=charge)
        try:
            layer = await self._unpack(chunks, digest, diff_id, tuple(below), limits)
        except BaseException as error:
            done.set_exception(error)
            # Waiting calls read it; without any, asyncio would report it as lost.
            done.exception()
            raise
        else:
            done.set_result(layer)
            return layer
        finally:
            del self._unpacking[key]

    async def _unpack(
        self,
        chunks: AsyncIterable[bytes],
        digest: str,
        diff_id: str,
        below: tuple[str, ...],
        limits: UnpackLimits,
    ) -> StoredLayer:
        loop = asyncio.get_running_loop()

        def view() -> LowerView:
            waiting = asyncio.run_coroutine_threadsafe(self._view(below), loop)
            while True:
                try:
                    return waiting.result(_CHECK_SECONDS)
                except concurrent.futures.TimeoutError:
                    try:
                        checkpoint()
                    except JobStopped:
                        waiting.cancel()
                        raise

        unpacking = partial(
            self._folder.unpack,
            digest=digest,
            diff_id=diff_id,
            below=below,
            limits=limits,
            keep_owners=self._keep_owners,
            view=view,
        )
        return await self._read(chunks, unpacking)

    async def unpack_written(
        self,
        chunks: AsyncIterable[bytes],
        row: SnapshotLayerRow,
        *,
        digest: str,
        below: Sequence[str],
    ) -> StoredLayer:
        """Unpack an archive of what a sandbox wrote, made by `archive`. A failure leaves nothing.

        Args:
            chunks: The archive, as it is or compressed.
            row: The layer that it becomes.
            digest: Digest of the archive before compression.
            below: The directories of the layers below it, the uppermost first.
        """
        self._keep(row.id)
        unpacking = partial(
            self._folder.unpack,
            digest="",
            diff_id=digest,
            below=(),
            limits=UnpackLimits(bytes=MAX_LAYER_BYTES, files=MAX_LAYER_FILES),
            keep_owners=self._keep_owners,
            view=lambda: LowerView(below),
            row=row,
        )
        return await self._read(chunks, unpacking)

    async def _read(
        self, chunks: AsyncIterable[bytes], unpack: Callable[[Iterator[bytes]], StoredLayer]
    ) -> StoredLayer:
        """Unpack chunks in a thread while they arrive."""
        job, pipe = Job(), ChunkPipe()
        unpacking = partial(unpack, iter(pipe))
        filling = asyncio.ensure_future(pipe.fill(chunks))
        working = asyncio.ensure_future(self._workers.run(job, unpacking))
        try:
            await asyncio.wait([filling, working], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                # Raises if the chunks could not be read.
                await filling
            return await working
        except BaseException:
            pipe.stop()
            working.cancel()
            await asyncio.wait([working])
            raise
        finally:
            filling.cancel()
            await asyncio.wait([filling])
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()

    async def _view(self, below: tuple[str, ...]) -> LowerView:
        """Return the layers below, once they are unpacked."""
        paths = []
        for number, diff_id in enumerate(below):
            if (
                other := self._unpacking.get(below[number : number + 1] + below[:number])
            ) is not None:
                await asyncio.wait([other])
            layer = self.find_layer(diff_id, below[:number])
            if layer is None:
                raise missing(diff_id)
            paths.append(layer.path)
        return LowerView(paths[::-1])

    def archive(self, layer: StoredLayer) -> Generator[bytes, None, None]:
        """Yield what a sandbox wrote as an uncompressed tar archive. Blocks."""
        ids = MAX_ID + 1 if self._keep_owners else 1
        return self._folder.packer(layer, ids=ids, whole=True).chunks()

    async def pack(self, layer: StoredLayer) -> AsyncGenerator[bytes, None]:
        """Yield the layer as an uncompressed tar archive, which is always the same bytes.

        The digest of an adopted layer is known once its archive was read to the end: `get` then
        has its `diff_id`. The archive of an unpacked layer may differ from the original one in
        order and padding, so that it has another digest: push the original blob where it is kept.
        """
        archive = self._folder.packer(layer, ids=MAX_ID + 1 if self._keep_owners else 1).chunks()
        digest = hashlib.sha256()
        job = Job()

        def read() -> bytes:
            parts: list[bytes] = []
            size = 0
            for part in archive:
                parts.append(part)
                size += len(part)
                if size >= _PACK_CHUNK:
                    break
            data = b"".join(parts)
            digest.update(data)
            return data

        try:
            while chunk := await self._workers.run(job, read):
                yield chunk
        finally:
            await self._workers.finish(archive.close)
        if layer.diff_id is None:
            found = replace(layer, diff_id=f"sha256:{digest.hexdigest()}")
            await self._workers.finish(self._folder.write, found)

    def new_layer_id(self) -> str:
        """Return a random id for what a sandbox wrote."""
        return new_global_id("upper")

    def begin(self) -> UnfinishedLayer:
        """Return an empty layer to write to. Blocks; use a lease until the layer is recorded."""
        return self._folder.begin()

    async def place(self, unfinished: UnfinishedLayer, row: SnapshotLayerRow) -> None:
        """Give a layer that a sandbox wrote its id, of `new_layer_id`, and put it on the disk."""
        self._keep(row.id)
        description = {
            "owner": 0,
            "target": row.target,
            "bytes": row.size,
            "files": row.files,
        }
        await self._workers.finish(unfinished.place, row.id, description, durable=True)

    async def adopt(
        self, directory: str, *, id: str, owner: int, target: str = "/", durable: bool = False
    ) -> StoredLayer:
        """Take the upper layer of a stopped sandbox as a layer, by one rename.

        Safe to repeat after a crash: record the id first; if the directory was moved before, the
        layer is returned. The directory is of the same file system as the store, and is no mount.

        Args:
            directory: The upper directory. It is gone afterwards.
            id: An id of `new_layer_id`.
            owner: The host id of its files of root.
            target: Where the sandbox saw it.
            durable: Have the move on the disk when this returns.
        """
        self._keep(id)
        adopt = partial(
            self._folder.adopt, directory, id=id, owner=owner, target=target, durable=durable
        )
        return await run_to_completion(asyncio.to_thread(adopt))

    async def drop(self, ids: Iterable[str]) -> None:
        """Remove layers that nothing refers to."""
        for id in ids:
            self._leased.discard(id)
            await self._workers.finish(self._folder.drop, id)

    async def measure(self, layer: StoredLayer) -> StoredLayer:
        """Return the layer with its size, which is measured once."""
        known = self.get(layer.id) or layer
        if known.bytes is not None:
            return known
        return await self._workers.run(Job(), self._folder.measure, known)

    async def prune(self, keep: Collection[str]) -> PruneResult:
        """Remove the layers that this engine does not keep and no other engine uses.

        Layers of an open lease, and those that are being unpacked, stay.

        Args:
            keep: Ids of all layers that images, snapshots and sandboxes of this engine refer to.
        """
        return await self.remove(self.discard(keep))

    def discard(self, keep: Collection[str], *, unused_for: float = 0.0) -> list[str]:
        """Move layers aside as `prune` does, and return what is left to remove.

        Everything that decides happens before this returns. Unpacked layers that were stored
        within `unused_for` seconds stay.
        """
        return self._folder.discard({*keep, *self._leased}, unused_for=unused_for)

    async def remove(self, discarded: Collection[str]) -> PruneResult:
        """Remove what `discard` moved aside. The next `prune` does it, if this is cancelled."""
        if not discarded:
            return PruneResult()
        return await self._workers.run(Job(), self._folder.remove, discarded)

    def close(self) -> None:
        """End the threads. Safe to repeat."""
        self._workers.close()

    def _use(self, id: str) -> StoredLayer | None:
        found = self._folder.use(id)
        if found is not None:
            self._keep(id)
        return found

    def _keep(self, id: str) -> None:
        if self._leases:
            self._leased.add(id)

    def _add(self, digest: str, make: Callable[[str], None]) -> str:
        os.makedirs(self.directory, exist_ok=True)
        self._sweep()
        unfinished = os.path.join(self.directory, _UNFINISHED + new_id())
        path = os.path.join(self.directory, digest)
        make_directory(unfinished)
        try:
            make(unfinished)
            os.rename(unfinished, path)
        except OSError:
            # Fine if another engine was faster.
            if not os.path.isdir(path):
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return path

    def _sweep(self) -> None:
        """Remove incomplete directories of killed engines."""
        with os.scandir(self.directory) as entries:
            unfinished = [entry.path for entry in entries if entry.name.startswith(_UNFINISHED)]
        for path in unfinished:
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(path, ignore_errors=True)


def make_directory(path: str, mode: int = 0o755) -> None:
    """Create a directory of exactly that mode, independent of the umask."""
    os.mkdir(path)
    os.chmod(path, mode)


def make_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Create a file of exactly that mode, independent of the umask."""
    with open(path, "xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
