"""The images of a host, as callers in the same process manage them: `Host.images`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.image import ImageConfig
    from smokebox.engine.images.layer_store import LayerStore, PruneResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """An image of a host. `size` counts its own layers on disk, also those it shares."""

    digest: str
    names: tuple[str, ...]
    source: str
    size: int
    layers: int
    created_at: float
    used_at: float
    config: ImageConfig


class Images:
    """The images of a host: load, list, inspect, remove and prune them.

    Paths are of the operator's choice; never pass on a path of a client.
    """

    def __init__(self, catalog: ImageCatalog, layer_store: LayerStore) -> None:
        self.catalog = catalog
        self.layer_store = layer_store

    async def load_oci(
        self,
        path: str | os.PathLike[str],
        *,
        reference: str | None = None,
        names: Sequence[str] = (),
        scope: str = "",
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
        raise NotImplementedError

    async def load_archive(
        self, path: str | os.PathLike[str], *, names: Sequence[str] = (), scope: str = ""
    ) -> list[ImageInfo]:
        """Load the images of an archive of `docker save` or of an OCI layout.

        Args:
            path: The archive.
            names: Names to start sandboxes by; by default those in the archive.
            scope: Prefix of the ids of the sandboxes that may use it; all by default.

        Raises:
            PathError: The archive cannot be read.
            ImageError: The archive is damaged.
        """
        raise NotImplementedError

    async def list(self, *, scope: str | None = None) -> list[ImageInfo]:
        """List the images that a scope may use, or all, the oldest first."""
        raise NotImplementedError

    async def inspect(self, name: str, *, scope: str | None = None) -> ImageInfo:
        """Return the image of a name or digest. Raises `NotFound`."""
        raise NotImplementedError

    async def remove(self, name: str, *, scope: str | None = None) -> None:
        """Remove a name, or the image of a digest, and what nothing else refers to.

        Raises:
            NotFound: There is no such image.
            Conflict: A sandbox or another image refers to the digest.
        """
        raise NotImplementedError

    async def prune(self, *, unused_for: float = 0.0) -> PruneResult:
        """Remove images without a name that nothing refers to. See `ImageCatalog.prune`."""
        return await self.catalog.prune(unused_for=unused_for)
