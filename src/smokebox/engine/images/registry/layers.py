"""One layer of a pull: downloaded and unpacked, or proven to be the caller's if it is stored.

A layer that is in the store already may belong to another tenant, and a manifest of the caller's
own can name any digest. So it is used only if it is known to come from the registry of this pull
or from an image that the caller may use; otherwise it is downloaded and compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, Protocol

import msgspec

from smokebox.engine.images.layer_store import MAX_LAYER_BYTES
from smokebox.engine.images.registry.manifests import Manifest
from smokebox.errors import ImageError
from smokebox.foundation.compression import BrokenTar, decompress
from smokebox.foundation.registry_names import explicit_registry
from smokebox.types import LayerProgress

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Iterable,
        Iterator,
        Sequence,
    )

    from smokebox.engine.images.catalog import CatalogImage, ImageCatalog
    from smokebox.engine.images.layer_store import LayerStore, StoredLayer
    from smokebox.engine.images.registry.manifests import Descriptor
    from smokebox.engine.images.usage import Charge
    from smokebox.errors import SmokeboxError
    from smokebox.types import LayerState

_PIECE = 1 << 20


class TrustedLayers:
    """Pairs of blob and diff_id that a pull may take from the store without a download.

    `added` are those that this pull downloaded.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = set(pairs)
        self.added: set[tuple[str, str]] = set()

    @classmethod
    async def find(
        cls,
        catalog: ImageCatalog,
        *,
        scope: str,
        registry: str,
        sent: Iterable[tuple[str, str]] = (),
    ) -> TrustedLayers:
        """Find the layers of images that the scope may use, or that this registry sent before.

        `sent` are those of images that are not complete.
        """
        usable = {one.digest for one in await catalog.list(scope=scope)}
        pairs = set(sent)
        for image in await catalog.list():
            if image.digest in usable or explicit_registry(image.source) == registry:
                known = known_blobs(image, catalog.layer_store)
                pairs.update((blob.digest, diff_id) for diff_id, blob in known.items())
        return cls(pairs)

    def add(self, pair: tuple[str, str]) -> None:
        """Add a layer that was downloaded."""
        self._pairs.add(pair)
        self.added.add(pair)

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return pair in self._pairs


def known_blobs(image: CatalogImage, layer_store: LayerStore) -> dict[str, Descriptor]:
    """Return the blobs of an image's layers by their diff_ids, if it was pulled."""
    found: dict[str, Descriptor] = {}
    with contextlib.suppress(msgspec.MsgspecError):
        manifest = msgspec.json.decode(image.manifest or b"", type=Manifest)
        for blob, layer in zip(manifest.layers, reversed(image.layers), strict=False):
            stored = layer_store.get(layer.id)
            if stored is not None and stored.diff_id is not None:
                found[stored.diff_id] = blob
    return found


class BlobSource(Protocol):
    """The place that an image comes from: a registry, or contents that a client uploaded."""

    image: str

    def stream(self, descriptor: Descriptor) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a blob."""
        ...

    def mismatch(self, part: str, digest: str) -> SmokeboxError:
        """Return the error for content that is not what its digest says."""
        ...


class LayerPull:
    """The pull of one layer from a source.

    Args:
        below: The diff_ids of the layers below it, the lowest first.
        report: Called with its progress.
        charge: Counts what is stored, if there is a ceiling.
    """

    def __init__(
        self,
        source: BlobSource,
        layer_store: LayerStore,
        blob: Descriptor,
        diff_id: str,
        below: Sequence[str],
        report: Callable[[LayerProgress], None],
        charge: Charge | None = None,
    ) -> None:
        self._source = source
        self._layer_store = layer_store
        self._blob = blob
        self._diff_id = diff_id
        self._below = below
        self._report = report
        self._charge = charge
        self._progress = LayerProgress(digest=blob.digest, done=0, total=blob.size, state="waiting")
        self._read_all = False
        report(self._progress)

    async def run(self, trusted: TrustedLayers) -> StoredLayer:
        """Return the layer once it is in the store and the caller may use it.

        Raises:
            RegistryError: The blob cannot be downloaded.
            ImageError: The blob is damaged, unsafe, or not what the digests say.
        """
        stored = await self._layer_store.unpack(
            self._chunks("downloading"),
            media_type=self._blob.media_type,
            digest=self._blob.digest,
            diff_id=self._diff_id,
            below=self._below,
            charge=None if self._charge is None else self._charge.add,
        )
        downloaded = self._read_all
        if self._charge is not None:
            self._charge.add_layer(stored, counted=downloaded)
        if not downloaded and (self._blob.digest, self._diff_id) not in trusted:
            await self._verify()
            downloaded = True
        if downloaded:
            # An image may have the same layer twice.
            trusted.add((self._blob.digest, self._diff_id))
        self._set(state="done" if downloaded else "present", done=self._blob.size)
        return stored

    async def _chunks(self, state: LayerState) -> AsyncIterator[bytes]:
        self._set(state=state, done=0)
        async with contextlib.aclosing(self._source.stream(self._blob)) as pieces:
            async for piece in pieces:
                self._set(done=self._progress.done + len(piece))
                yield piece
        self._read_all = True
        if state == "downloading":
            self._set(state="unpacking")

    async def _verify(self) -> None:
        """Download the blob, and compare it and its content with both digests."""
        with tempfile.TemporaryFile(dir=self._layer_store.directory) as file:
            async for piece in self._chunks("verifying"):
                await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(file.seek, 0)
            blob, content = await asyncio.to_thread(_digests, file)
        if blob != self._blob.digest:
            raise self._source.mismatch("a layer", self._blob.digest)
        if content != self._diff_id:
            raise ImageError(
                f"a layer of {self._source.image} is not the one that its configuration names.",
                hint="The image is damaged: push it again.",
                reason="mismatch",
                image=self._blob.digest,
            )

    def _set(self, *, state: LayerState | None = None, done: int | None = None) -> None:
        known = self._progress
        self._progress = replace(
            known,
            state=state or known.state,
            done=known.done if done is None else done,
        )
        self._report(self._progress)


def _digests(file: BinaryIO) -> tuple[str, str]:
    """Return the digests of a compressed file and of its content."""
    compressed, content, size = hashlib.sha256(), hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        while piece := file.read(_PIECE):
            compressed.update(piece)
            yield piece

    unread = pieces()
    try:
        for piece in decompress(unread):
            content.update(piece)
            size += len(piece)
            if size > MAX_LAYER_BYTES:
                break
    except BrokenTar:
        # What was read up to here has another digest.
        content.update(b"damaged")
    for _ in unread:
        pass
    return f"sha256:{compressed.hexdigest()}", f"sha256:{content.hexdigest()}"
