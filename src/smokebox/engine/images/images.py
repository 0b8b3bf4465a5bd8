"""The images of a host, as callers in the same process manage them: `Host.images`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.images.catalog import SHARED, CatalogImage, LayerReference, unknown
from smokebox.engine.images.image import ImageConfig, diff_ids
from smokebox.engine.images.image_config import DIGEST
from smokebox.engine.images.image_documents import (
    DOCKER,
    INDEX,
    ImageDocument,
    read_docker,
    read_layout,
)
from smokebox.engine.images.image_files import ArchiveFiles, DirectoryFiles, check_present
from smokebox.engine.images.platforms import host_platform
from smokebox.errors import Conflict, Forbidden, ImageError, NotFound

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable, Callable, Sequence

    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.image_files import ImageFiles
    from smokebox.engine.images.layer_store import LayerStore, PruneResult, StoredLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """An image of a host. `size` counts its own layers on disk, also those it shares.

    `diff_ids` are the digests of its layers, the lowest first; those not known yet are left out.
    """

    digest: str
    names: tuple[str, ...]
    source: str
    size: int
    layers: int
    created_at: float
    used_at: float
    config: ImageConfig
    diff_ids: tuple[str, ...] = ()


class Images:
    """The images of a host: load, list, inspect, remove and prune them.

    Paths are of the operator's choice; never pass on a path of a client.
    """

    def __init__(self, catalog: ImageCatalog, on_removed: Callable[[], Awaitable[None]]) -> None:
        self.catalog = catalog
        # Called when layers were removed that jails of the pool may be mounted on.
        self._on_removed = on_removed

    @property
    def layer_store(self) -> LayerStore:
        """The store of their layers."""
        return self.catalog.layer_store

    async def load_oci(
        self,
        path: str | os.PathLike[str],
        *,
        reference: str | None = None,
        names: Sequence[str] = (),
        scope: str = SHARED,
    ) -> ImageInfo:
        """Load an image from an OCI layout, a directory with `index.json`.

        Args:
            path: The directory.
            reference: The image's `org.opencontainers.image.ref.name`; needed if there are several.
            names: Names to start sandboxes by; by default the reference.
            scope: Prefix of the ids of the sandboxes that may use it; all by default.

        Raises:
            PathError: The directory cannot be read.
            ImageError: The layout is damaged.
            NotFound: It has no such image, or none for this machine.
        """
        files = await asyncio.to_thread(DirectoryFiles, os.fspath(path))
        with contextlib.closing(files):
            check_present(files, INDEX)
            document = await asyncio.to_thread(read_layout, files, reference)
            return await self._load(files, document, names, scope, "oci")

    async def load_archive(
        self, path: str | os.PathLike[str], *, names: Sequence[str] = (), scope: str = SHARED
    ) -> list[ImageInfo]:
        """Load the images of an archive of `docker save` or of an OCI layout.

        Args:
            path: The archive.
            names: Names to start sandboxes by, if it has one image; by default those in it.
            scope: Prefix of the ids of the sandboxes that may use it; all by default.

        Raises:
            PathError: The archive cannot be read.
            ImageError: The archive is damaged.
            NotFound: It has no image for this machine.
        """
        directory = self.catalog.layer_store.directory
        await asyncio.to_thread(os.makedirs, directory, exist_ok=True)
        files = await asyncio.to_thread(ArchiveFiles, os.fspath(path), directory)
        with contextlib.closing(files):
            check_present(files, DOCKER, INDEX)
            if files.exists(DOCKER):
                documents = await asyncio.to_thread(read_docker, files)
            else:
                documents = [await asyncio.to_thread(read_layout, files, None)]
            if names and len(documents) > 1:
                raise NotFound(
                    f"{path} has several images.",
                    hint="Leave out names, and use those in the archive.",
                    kind="image",
                    name=names[0],
                )
            return [
                await self._load(files, document, names, scope, "archive") for document in documents
            ]

    async def inspect(self, name: str, *, scope: str | None = None) -> ImageInfo:
        """Return the image of a name or digest. Raises `NotFound`."""
        return await self._info(await self.find(name, scope), scope)

    async def remove(self, name: str, *, scope: str | None = None) -> None:
        """Remove a name, or the image of a digest, and what nothing else refers to.

        Raises:
            NotFound: There is no such image.
            Conflict: A sandbox or another image refers to the digest.
            Forbidden: The scope may use the image because it is shared, and cannot remove it.
        """
        found = await self.find(name, scope)
        if scope is None and DIGEST.fullmatch(name):
            await self.catalog.remove(name)
        else:
            if not await self.catalog.withdraw(name, found.digest, scope):
                raise Forbidden(
                    f"the image {name!r} belongs to the operator, who shares it.",
                    hint="Let the operator remove it.",
                    reason="scope",
                )
            if not await self.catalog.names(found.digest):
                # Whatever uses it keeps it until it is pruned.
                with contextlib.suppress(Conflict):
                    await self.catalog.remove(found.digest)
        await self._removed(await self.catalog.sweep())

    async def prune(self, *, unused_for: float = 0.0) -> PruneResult:
        """Remove images without a name that nothing refers to. See `ImageCatalog.prune`."""
        return await self._removed(await self.catalog.prune(unused_for=unused_for))

    async def list(self, *, scope: str | None = None) -> builtins.list[ImageInfo]:
        """List the images that a scope may use, or all, the oldest first."""
        return [await self._info(one, scope) for one in await self.catalog.list(scope=scope)]

    async def _removed(self, result: PruneResult) -> PruneResult:
        if result.layers:
            await self._on_removed()
        return result

    async def find(self, name: str, scope: str | None = None) -> CatalogImage:
        """Return the image of a name or digest from the catalog. Raises `NotFound`."""
        found = await self.catalog.find(name, scope=scope)
        if found is None:
            raise unknown(name)
        return found

    async def _info(self, image: CatalogImage, scope: str | None) -> ImageInfo:
        stored = [self.layer_store.get(one.id) for one in reversed(image.layers)]
        return ImageInfo(
            digest=image.digest,
            names=tuple(await self.catalog.names(image.digest, scope=scope)),
            source=image.source,
            size=image.size,
            layers=len(image.layers),
            created_at=image.created_at,
            used_at=image.used_at,
            config=image.config,
            diff_ids=tuple(one.diff_id for one in stored if one is not None and one.diff_id),
        )

    async def _load(
        self,
        files: ImageFiles,
        document: ImageDocument,
        names: Sequence[str],
        scope: str,
        source: str,
    ) -> ImageInfo:
        config, digests = ImageConfig.from_oci(document.config), diff_ids(document.config)
        check_document(config, digests, document, files.path)
        store = self.catalog.layer_store
        with self.catalog.lease():
            layers: list[StoredLayer] = []
            for number, (file, diff_id) in enumerate(zip(document.layers, digests, strict=True)):
                below = digests[:number]
                found = store.find_layer(diff_id, below) or await store.unpack(
                    files.chunks(file.name),
                    media_type=file.media_type,
                    digest=file.digest,
                    diff_id=diff_id,
                    below=below,
                )
                layers.insert(0, found)
            image = CatalogImage(
                digest=document.digest,
                config=config,
                layers=tuple(LayerReference(id=layer.id) for layer in layers),
                source=source,
                manifest=document.manifest,
                size=sum(layer.bytes or 0 for layer in layers),
            )
            await self.catalog.put(image, names=names or document.names, scope=scope)
            return await self.inspect(document.digest)


def check_document(
    config: ImageConfig, digests: Sequence[str], document: ImageDocument, path: str
) -> None:
    """Raise unless an image on disk is whole and for this machine."""
    if len(digests) != len(document.layers):
        raise ImageError(
            f"the image in {path} is damaged: its configuration names {len(digests)} layers, and "
            f"its manifest {len(document.layers)}.",
            hint="Copy the whole image again.",
            reason="damaged",
            image=document.digest,
        )
    wanted = host_platform().architecture
    if (config.os, config.architecture or wanted) != ("linux", wanted):
        raise NotFound(
            f"the image in {path} is for {config.os}/{config.architecture}, and this machine is "
            f"linux/{wanted}.",
            hint="Get the image for this machine.",
            kind="image",
            name=path,
        )
