"""Pushes of catalogued images to registries. Layers that the repository has are not sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from smokebox.engine.images.media_types import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST
from smokebox.engine.images.registry.layers import known_blobs
from smokebox.engine.images.registry.manifests import digest_of
from smokebox.engine.images.registry.reference import parse_reference
from smokebox.engine.images.registry.upload import RepositoryUpload
from smokebox.errors import DeadlineExceeded, ImageError, InvalidOption, SmokeboxError, Unsupported
from smokebox.types import LayerProgress, PushedImage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smokebox.engine.images.catalog import CatalogImage, ImageCatalog
    from smokebox.engine.images.layer_store import StoredLayer
    from smokebox.engine.images.registry.access import RegistryAccess
    from smokebox.engine.images.registry.manifests import Descriptor
    from smokebox.engine.images.registry.pull import RegistryImages
    from smokebox.engine.images.registry.reference import Reference
    from smokebox.types import LayerState

PUSH_SECONDS = 3600.0
_PIECE = 1 << 20
# As fast as pigz -1 on one core; registries store layers once and send them often.
_LEVEL = 4
_LONGEST_CHAIN = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blob:
    digest: str
    size: int
    diff_id: str
    media_type: str = f"{OCI_LAYER}+gzip"


@dataclass(frozen=True, slots=True)
class _KnownBlob:
    """The blob that a layer was pulled as, and the reference that it came from."""

    blob: Descriptor
    source: str

    async def is_in(self, upload: RepositoryUpload, target: Reference) -> bool:
        """Return whether the target repository has the blob, or could take it over."""
        if await upload.has_blob(self.blob.digest):
            return True
        try:
            source = parse_reference(self.source)
        except InvalidOption:
            return False
        if source.registry != target.registry or source.repository == target.repository:
            return False
        return await upload.mount_blob(self.blob.digest, source.repository)

    def described(self, diff_id: str) -> _Blob:
        """Return it as a part of an OCI manifest."""
        suffix = next((one for one in ("gzip", "zstd") if self.blob.media_type.endswith(one)), "")
        media_type = f"{OCI_LAYER}+{suffix}" if suffix else OCI_LAYER
        return _Blob(
            digest=self.blob.digest, size=self.blob.size, diff_id=diff_id, media_type=media_type
        )


class ImagePusher:
    """Pushes images of one host to registries.

    Args:
        registries: Opens clients.
        catalog: Images and their layers.
    """

    def __init__(self, registries: RegistryImages, catalog: ImageCatalog) -> None:
        self._registries = registries
        self._catalog = catalog
        self._layer_store = catalog.layer_store

    async def push(
        self,
        image: CatalogImage,
        target: str,
        access: RegistryAccess,
        *,
        timeout: float = PUSH_SECONDS,
        progress: Callable[[LayerProgress], None] | None = None,
    ) -> PushedImage:
        """Push an image to a reference with a tag.

        Args:
            image: An image that the caller may use.
            target: Where to push it to.
            access: Rights of the caller.
            timeout: Seconds for the whole push.
            progress: Called with the progress of each layer.

        Raises:
            InvalidOption: The reference is not valid, or has a digest.
            Unsupported: The image needs the files of this host.
            RegistryError: The registry refuses or fails.
            DeadlineExceeded: It took longer than `timeout`.
        """
        reference = parse_reference(target, self._registries.settings.default)
        if reference.digest is not None:
            raise InvalidOption(
                f"{target!r} has a digest, which follows from the content.",
                hint="Push to a tag.",
                option="target",
                value=target,
            )
        chain = await self._chain(image)
        layers = self._layers(chain)
        known: dict[str, _KnownBlob] = {}
        for one in chain:
            blobs = known_blobs(one, self._layer_store)
            known |= {diff_id: _KnownBlob(blob, one.source) for diff_id, blob in blobs.items()}
        try:
            async with (
                asyncio.timeout(timeout) as deadline,
                self._registries.open_client(reference, access) as client,
            ):
                upload = RepositoryUpload(client)
                sent = [
                    await self._push_layer(upload, reference, layer, known, progress or _ignore)
                    for layer in layers
                ]
                config = json.dumps(image.config.to_oci([one.diff_id for one in sent])).encode()
                await _put(upload, config)
                manifest = json.dumps(_manifest(config, sent)).encode()
                await upload.put_manifest(reference.target, OCI_MANIFEST, manifest)
        except TimeoutError as error:
            if isinstance(error, SmokeboxError) or not deadline.expired():
                raise
            raise DeadlineExceeded(
                f"the push of {reference} timed out after {timeout:g} s.",
                hint="Push it again: layers that were sent are kept.",
                operation="push",
                timeout=timeout,
            ) from None
        return PushedImage(reference=str(reference), digest=digest_of(manifest))

    async def _chain(self, image: CatalogImage) -> list[CatalogImage]:
        """Return an image and those that it is made on top of."""
        found = [image]
        while found[-1].base and len(found) < _LONGEST_CHAIN:
            base = await self._catalog.get(found[-1].base)
            if base is None:
                raise Unsupported(
                    f"the image is made on top of {found[-1].base!r}, which is not in the catalog.",
                    hint="Build it on an image of a registry, such as 'debian:12'.",
                    operation="push",
                )
            found.append(base)
        return found

    def _layers(self, chain: list[CatalogImage]) -> list[StoredLayer]:
        """Return the layers of images, the lowest first."""
        found: list[StoredLayer] = []
        for layer in (layer for image in chain for layer in image.layers):
            stored = self._layer_store.get(layer.id) if layer.target == "/" else None
            if stored is None:
                raise ImageError(
                    "a layer of the image is not in the store.",
                    hint="Pull or build the image again.",
                    reason="missing",
                    image=layer.id,
                )
            found.append(stored)
        return found[::-1]

    async def _push_layer(
        self,
        upload: RepositoryUpload,
        target: Reference,
        layer: StoredLayer,
        known: dict[str, _KnownBlob],
        report: Callable[[LayerProgress], None],
    ) -> _Blob:
        name = layer.diff_id or layer.id

        def tell(state: LayerState, done: int, total: int) -> None:
            report(LayerProgress(digest=name, done=done, total=total, state=state))

        original = known.get(name)
        if original is not None and await original.is_in(upload, target):
            tell("present", original.blob.size, original.blob.size)
            return original.described(name)
        with tempfile.TemporaryFile(dir=self._layer_store.directory) as file:
            tell("packing", 0, layer.bytes or 0)
            blob = await self._pack(
                layer, file, lambda size: tell("packing", size, layer.bytes or 0)
            )
            if not await upload.has_blob(blob.digest):

                async def content() -> AsyncIterator[bytes]:
                    sent = 0
                    await asyncio.to_thread(file.seek, 0)
                    while piece := await asyncio.to_thread(file.read, _PIECE):
                        yield piece
                        sent += len(piece)
                        tell("uploading", sent, blob.size)

                await upload.put_blob(blob.digest, blob.size, content)
                tell("done", blob.size, blob.size)
            else:
                tell("present", blob.size, blob.size)
        return blob

    async def _pack(
        self, layer: StoredLayer, file: BinaryIO, report: Callable[[int], None]
    ) -> _Blob:
        """Write a layer as a compressed archive into a file."""
        packer = _Packer(file)
        async for piece in self._layer_store.pack(layer):
            await asyncio.to_thread(packer.feed, piece)
            report(packer.read)
        return await asyncio.to_thread(packer.finish)


class _Packer:
    """Compresses and hashes an archive. The result depends on its bytes only."""

    def __init__(self, file: BinaryIO) -> None:
        self.read = 0
        self._file = file
        self._inner = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        self._content, self._compressed = hashlib.sha256(), hashlib.sha256()
        self._size = 0

    def feed(self, piece: bytes) -> None:
        """Add a piece of the archive."""
        self.read += len(piece)
        self._content.update(piece)
        self._write(self._inner.compress(piece))

    def finish(self) -> _Blob:
        """Write the end, and return the digests."""
        self._write(self._inner.flush())
        self._file.flush()
        return _Blob(
            digest=f"sha256:{self._compressed.hexdigest()}",
            size=self._size,
            diff_id=f"sha256:{self._content.hexdigest()}",
        )

    def _write(self, data: bytes) -> None:
        self._compressed.update(data)
        self._size += len(data)
        self._file.write(data)


async def _put(upload: RepositoryUpload, data: bytes) -> None:
    digest = digest_of(data)

    async def content() -> AsyncIterator[bytes]:
        yield data

    if not await upload.has_blob(digest):
        await upload.put_blob(digest, len(data), content)


def _manifest(config: bytes, blobs: list[_Blob]) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {"mediaType": one.media_type, "digest": one.digest, "size": one.size} for one in blobs
        ],
    }


def _ignore(progress: LayerProgress) -> None:
    pass
