"""Images that a client reads from its own files: an OCI layout, or an archive of `docker save`.

The client sends the documents, and uploads only the layers that its scope does not have. A layer
that another scope brought is not used before this one has sent it too: knowing a digest is not
enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from smokebox.engine.images.catalog import SHARED, CatalogImage, LayerReference
from smokebox.engine.images.image import ImageConfig, diff_ids
from smokebox.engine.images.image_documents import DOCKER, INDEX, read_docker, read_layout
from smokebox.engine.images.image_files import FilePart, ImageFiles, absent, check_present
from smokebox.engine.images.images import check_document
from smokebox.engine.images.registry.layers import LayerPull, TrustedLayers
from smokebox.engine.images.registry.manifests import Descriptor
from smokebox.engine.names import is_image_name
from smokebox.errors import ImageError, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from smokebox.engine.images.build.context import ContentStore
    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.image_documents import ImageDocument, LayerFile
    from smokebox.engine.images.usage import Charge, Charging
    from smokebox.types import LayerProgress

_SHA256 = "sha256:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUpload:
    """An image that a client sends.

    Attributes:
        path: Its place on the client's side, for errors.
        documents: The index, manifests and configurations, by their names in the layout.
        contents: SHA-256 of the other files, such as layers, by name.
        reference: Name of the image, if there are several.
        names: Names that the image gets; by default the valid ones of those that it has.
        scope: Owner of the image and of what is uploaded.
        share: Let every scope use it.
        charging: Counts what is stored against the quota of the caller.
    """

    path: str
    documents: Mapping[str, bytes]
    contents: Mapping[str, str]
    reference: str | None = None
    names: tuple[str, ...] | None = None
    scope: str = ""
    share: bool = False
    charging: Charging | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """An image of the catalog, or the digests of the contents that have to be uploaded first."""

    image: CatalogImage | None = None
    missing: tuple[str, ...] = field(default=())


class UploadedImages:
    """Puts images of clients into the catalog, one at a time for each scope."""

    def __init__(self, catalog: ImageCatalog, content: ContentStore) -> None:
        self._catalog = catalog
        self._content = content
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def load(
        self, upload: ImageUpload, *, progress: Callable[[LayerProgress], None]
    ) -> UploadResult:
        """Put an image into the catalog, or return the contents that it lacks.

        Uploaded layers are removed once they are unpacked.

        Args:
            upload: The image.
            progress: Called with the progress of each layer.

        Raises:
            ImageError: The image is damaged or unsafe.
            NotFound: There is no such image in it, or none for this machine.
        """
        document = _choose(_UploadedFiles(upload), upload)
        names = upload.names
        if names is None:
            names = tuple(one for one in document.names if is_image_name(one))
        config, ids = ImageConfig.from_oci(document.config), diff_ids(document.config)
        check_document(config, ids, document, upload.path)
        # Held over the upload's check and the removal of its contents by another load.
        lock = self._locks.setdefault(upload.scope, asyncio.Lock())
        async with lock, contextlib.AsyncExitStack() as stack:
            with self._catalog.lease():
                layers = _Layers(self._catalog, self._content, upload, document, ids)
                if missing := await layers.missing():
                    return UploadResult(missing=missing)
                charging = upload.charging
                charge = await stack.enter_async_context(charging()) if charging else None
                stored = await layers.unpack(progress, charge)
                # What is known of an image stays: it may be of another scope too.
                image = await self._catalog.get(document.digest) or CatalogImage(
                    digest=document.digest,
                    config=config,
                    layers=tuple(reversed(stored)),
                    source="oci" if document.manifest else "archive",
                    manifest=document.manifest,
                    size=layers.size,
                )
                scope = SHARED if upload.share else upload.scope
                await self._catalog.put(image, names=names, scope=scope)
            for digest in layers.digests:
                self._content.remove(digest, scope=upload.scope)
        return UploadResult(image=image)


class _Layers:
    """The layers of one upload, the lowest first."""

    def __init__(
        self,
        catalog: ImageCatalog,
        content: ContentStore,
        upload: ImageUpload,
        document: ImageDocument,
        ids: Sequence[str],
    ) -> None:
        self._catalog = catalog
        self._store = catalog.layer_store
        self._source = _ContentSource(upload, content)
        self._ids = ids
        self._has_manifest = bool(document.manifest)
        self._blobs = [_blob(one, upload) for one in document.layers]
        self._trusted = TrustedLayers()
        self.size = 0

    @property
    def digests(self) -> list[str]:
        """The digests of their contents."""
        return [blob.digest.removeprefix(_SHA256) for blob in self._blobs]

    async def missing(self) -> tuple[str, ...]:
        """Return the contents that are neither uploaded nor in the store for this scope."""
        scope = self._source.scope
        self._trusted = await TrustedLayers.find(self._catalog, scope=scope, registry="")
        if not self._has_manifest:
            # No manifest relates these to blobs: it is enough that the scope can read the files.
            readable = await self._readable(scope)
            for blob, diff_id in zip(self._blobs, self._ids, strict=True):
                if diff_id in readable:
                    self._trusted.add((blob.digest, diff_id))
        wanted = [
            digest
            for at, digest in enumerate(self.digests)
            if (self._blobs[at].digest, self._ids[at]) not in self._trusted
            or self._store.find_layer(self._ids[at], self._ids[:at]) is None
        ]
        return tuple(self._source.content.missing(dict.fromkeys(wanted), scope=scope))

    async def unpack(
        self, progress: Callable[[LayerProgress], None], charge: Charge | None
    ) -> list[LayerReference]:
        """Unpack and compare all layers, and return them."""
        found = []
        for at, blob in enumerate(self._blobs):
            described = msgspec.structs.replace(blob, size=self._source.size(blob))
            below = self._ids[:at]
            pull = LayerPull(
                self._source, self._store, described, self._ids[at], below, progress, charge
            )
            layer = await pull.run(self._trusted)
            self.size += layer.bytes or 0
            found.append(LayerReference(id=layer.id))
        return found

    async def _readable(self, scope: str) -> set[str | None]:
        return {
            stored.diff_id
            for image in await self._catalog.list(scope=scope)
            for layer in image.layers
            if (stored := self._store.get(layer.id)) is not None
        }


class _ContentSource:
    """Blobs of an image from the contents that its scope uploaded."""

    def __init__(self, upload: ImageUpload, content: ContentStore) -> None:
        self.image = upload.path
        self.scope = upload.scope
        self.content = content

    def size(self, descriptor: Descriptor) -> int:
        """Return the size of a content; 0 if it is not uploaded."""
        return self.content.size(descriptor.digest.removeprefix(_SHA256), scope=self.scope)

    async def stream(self, descriptor: Descriptor) -> AsyncGenerator[bytes, None]:
        """Yield a content."""
        digest = descriptor.digest.removeprefix(_SHA256)
        with open(self.content.open(digest, scope=self.scope), "rb") as file:  # noqa: ASYNC230
            while chunk := await asyncio.to_thread(file.read, 1 << 20):
                yield chunk

    def mismatch(self, part: str, digest: str) -> ImageError:
        return ImageError(
            f"{part} of {self.image} is not {digest}.",
            hint="The image is damaged: copy the whole image again.",
            reason="mismatch",
            image=self.image,
        )


class _UploadedFiles(ImageFiles):
    """The documents of an upload as files of an image."""

    def __init__(self, upload: ImageUpload) -> None:
        super().__init__(upload.path)
        self._documents = upload.documents

    def exists(self, name: str) -> bool:
        return name in self._documents

    def open(self, name: str) -> FilePart:
        raise absent(name)

    def read(self, name: str) -> bytes:
        if name not in self._documents:
            raise absent(name)
        return self._documents[name]


def _choose(files: ImageFiles, upload: ImageUpload) -> ImageDocument:
    """Return the image that an upload means."""
    check_present(files, DOCKER, INDEX)
    if not files.exists(DOCKER):
        return read_layout(files, upload.reference)
    documents = read_docker(files)
    found = [
        one
        for one in documents
        if upload.reference in (None, one.digest) or upload.reference in one.names
    ]
    if len(found) == 1:
        return found[0]
    known = ", ".join(name for one in documents for name in one.names or (one.digest,))
    raise NotFound(
        f"{upload.path} has {'several images' if found else f'no image {upload.reference!r}'}.",
        hint=f"Write archive:FILE:NAME with one of: {known}.",
        kind="image",
        name=upload.reference or "",
    )


def _blob(layer: LayerFile, upload: ImageUpload) -> Descriptor:
    content = upload.contents.get(layer.name)
    if content is None:
        raise absent(layer.name)
    digest = _SHA256 + content
    if layer.digest.startswith(_SHA256) and layer.digest != digest:
        raise ImageError(
            f"the layer {layer.name!r:.200} of {upload.path} is not {layer.digest}.",
            hint="The image is damaged: copy the whole image again.",
            reason="mismatch",
            image=upload.path,
        )
    return Descriptor(media_type=layer.media_type, digest=digest, size=0)
