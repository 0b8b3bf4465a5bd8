"""The store of layers: directories that never change once they are complete.

There are two kinds. Layers made from this host are found by a digest of their input (`ensure`).
Layers of images are found by the digest of their unpacked tar archive, or by a random id if they
were the upper layer of a sandbox.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.images.image import Layer
from smokebox.errors import from_os_error
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        Callable,
        Collection,
        Iterator,
        Sequence,
    )

_UNFINISHED = ".making-"
_ABANDONED_AFTER = 3600.0

MAX_LAYER_BYTES = 64 << 30
MAX_LAYER_FILES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A layer of an image in the store.

    `id` names it in the store: the diff_id, alone or with the digest of the layers below if its
    content depends on them, or a random one for an adopted upper layer. `owner` is as in `Layer`.
    `diff_id` is the digest of its tar archive; None until an adopted layer is packed. `bytes` and
    `files` are None until an adopted layer is measured.
    """

    id: str
    path: str
    owner: int = 0
    diff_id: str | None = None
    bytes: int | None = None
    files: int | None = None

    def at(self, target: str = "/") -> Layer:
        """Return it as a layer of an image."""
        return Layer(path=self.path, target=target, owner=self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """Layers that were removed, and the bytes that they occupied."""

    layers: int = 0
    bytes: int = 0


class LayerStore:
    """Layers in `directory`, which several engines may share.

    `user` names the engine by its state directory. An engine registers the layers that it uses,
    and none of another engine's are removed.
    """

    def __init__(self, directory: str, *, user: str = "") -> None:
        self.directory = os.path.abspath(directory)
        self._user = user

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
        """Return a complete layer of an image by its id."""
        raise NotImplementedError

    def find_layer(self, diff_id: str, below: Sequence[str] = ()) -> StoredLayer | None:
        """Return an unpacked layer, if it is complete.

        Args:
            diff_id: Digest of its tar archive.
            below: The diff_ids of the layers below it in the image, the lowest first.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Keep from `prune` what is unpacked, found or adopted in the block.

        Use it from the first `find_layer` to the `ImageCatalog.put` of the image.
        """
        raise NotImplementedError
        yield

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
    ) -> StoredLayer:
        """Unpack the blob of a layer. A failure leaves nothing.

        Layers of one image may be unpacked concurrently if they are begun from the lowest up: one
        whose content depends on those below waits for them. Unpacking a layer that is complete, or
        that another call unpacks, reads none of `chunks`.

        Args:
            chunks: The blob.
            media_type: Its media type, which names the compression: none, gzip or zstd.
            digest: Digest of the blob; empty if only the diff_id is known.
            diff_id: Digest of the uncompressed tar archive.
            below: The diff_ids of the layers below it in the image, the lowest first.
            max_bytes: Size of its files at most.
            max_files: Number of its members at most.

        Raises:
            ImageError: The blob is damaged, unsafe, or not what the digests say.
            LimitReached: It has more bytes or members than allowed.
            StorageFull: The disk is full.
        """
        raise NotImplementedError

    def pack(self, layer: StoredLayer) -> AsyncGenerator[bytes, None]:
        """Yield the layer as an uncompressed tar archive, which is always the same bytes.

        The digest of an adopted layer is known once its archive was read to the end: `get` then
        has its `diff_id`. The archive of an unpacked layer may differ from the original one in
        order and padding, so that it has another digest: push the original blob where it is kept.
        """
        raise NotImplementedError

    def new_layer_id(self) -> str:
        """Return a random id for a layer that is about to be adopted."""
        return new_id("upper")

    async def adopt(self, directory: str, *, id: str, owner: int) -> StoredLayer:
        """Take the upper layer of a stopped sandbox as a layer, by one rename.

        Safe to repeat after a crash: record the id first; if the directory was moved before, the
        layer is returned. The directory is of the same file system as the store, and is no mount.

        Args:
            directory: The upper directory. It is gone afterwards.
            id: An id of `new_layer_id`.
            owner: The host id of its files of root.
        """
        raise NotImplementedError

    async def measure(self, layer: StoredLayer) -> StoredLayer:
        """Return the layer with its size, which is measured once."""
        raise NotImplementedError

    async def prune(self, keep: Collection[str]) -> PruneResult:
        """Remove the layers that this engine does not keep and no other engine uses.

        Layers of an open lease, and those that are being unpacked, stay.

        Args:
            keep: Ids of all layers that images, snapshots and sandboxes of this engine refer to.
        """
        raise NotImplementedError

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
