"""The catalog of images that this host knows, in the durable record.

An image is recorded once all its layers are in the store. It stays until it is removed, or pruned
while no name, sandbox or other image refers to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.engine.images.image import Image, ImageConfig
    from smokebox.engine.images.layer_store import LayerStore, PruneResult
    from smokebox.engine.record.record import Record

SHARED = ""
"""The scope of images that every sandbox may start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReference:
    """A layer of a catalogued image: its id in the store, and where it is seen."""

    id: str
    target: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogImage:
    """An image in the catalog.

    Attributes:
        digest: The digest of the config blob, else `image_digest`.
        config: Its whole configuration.
        layers: Its own layers, the uppermost first.
        base: Name or digest of the image that its layers are stacked on; empty for a whole one.
            A snapshot has the image of its sandbox as its base, which may be `host`.
        source: Its origin in words, such as a reference or `oci`.
        manifest: The manifest that it was pulled by, as JSON; empty if there is none.
        created_at: Time when it was added.
        used_at: Time when a sandbox was last created from it.
        size: Bytes of its own layers on disk.
    """

    digest: str
    config: ImageConfig
    layers: tuple[LayerReference, ...]
    base: str = ""
    source: str = ""
    manifest: str = ""
    created_at: float = 0.0
    used_at: float = 0.0
    size: int = 0


class ImageCatalog:
    """The images of one host, by digest and by name.

    A scope is a prefix of sandbox ids. A name or grant of a scope is valid for the sandboxes whose
    ids start with it, and one of `SHARED` for all. Where a parameter `scope` asks for permission,
    the id of a sandbox works as well; None is the operator, who may use everything.
    """

    def __init__(self, record: Record, layer_store: LayerStore) -> None:
        self._record = record
        self._layer_store = layer_store

    async def put(
        self, image: CatalogImage, *, names: Iterable[str] = (), scope: str = SHARED
    ) -> None:
        """Record an image whose layers are stored, name it, and grant it to a scope.

        An image that is known keeps its other names and grants. A name of the same scope moves to
        this image.

        Raises:
            ImageError: A layer is not in the store.
        """
        raise NotImplementedError

    async def find(self, name: str, *, scope: str | None = None) -> CatalogImage | None:
        """Return the image of a name or digest that the scope may use, or None.

        A name of the longest matching scope wins.
        """
        raise NotImplementedError

    async def get(self, digest: str) -> CatalogImage | None:
        """Return the image of a digest, or None. The caller checks the permission."""
        raise NotImplementedError

    async def load(self, image: CatalogImage, name: str) -> Image:
        """Return the image as the layers on disk that a sandbox starts from.

        Files of ours in /etc are above its layers, and mount points below.

        Raises:
            ImageError: A layer is gone from the store.
        """
        raise NotImplementedError

    async def names(self, digest: str, *, scope: str | None = None) -> list[str]:
        """Return the names of an image that are valid in the scope, sorted."""
        raise NotImplementedError

    async def name(self, name: str, digest: str, *, scope: str = SHARED) -> None:
        """Name an image, and move the name if it has another. Raises `NotFound`."""
        raise NotImplementedError

    async def unname(self, name: str, *, scope: str = SHARED) -> bool:
        """Remove a name, and return False if there was none. The image stays until it is pruned."""
        raise NotImplementedError

    async def grant(self, digest: str, scope: str) -> None:
        """Let the sandboxes of a scope start from an image. Raises `NotFound`."""
        raise NotImplementedError

    async def is_granted(self, digest: str, scope: str) -> bool:
        """Return whether the sandboxes of a scope may start from an image."""
        raise NotImplementedError

    async def touch(self, digest: str) -> None:
        """Record that a sandbox was created from an image at this moment."""
        raise NotImplementedError

    async def remove(self, digest: str) -> None:
        """Remove an image with its names and grants; its layers go with the next `prune`.

        Raises:
            NotFound: There is no such image.
            Conflict: A sandbox or another image refers to it.
        """
        raise NotImplementedError

    async def prune(self, *, unused_for: float = 0.0) -> PruneResult:
        """Remove images without a name that nothing refers to, and layers of no image.

        Args:
            unused_for: Keep images that were added or used within this number of seconds.
        """
        raise NotImplementedError

    async def list(self, *, scope: str | None = None) -> list[CatalogImage]:
        """Return the images that the scope may use, the oldest first."""
        raise NotImplementedError
