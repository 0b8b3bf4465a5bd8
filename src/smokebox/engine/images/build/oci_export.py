"""Export of images as OCI layouts, which skopeo, umoci and others read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.images.media_types import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST
from smokebox.errors import ImageError, PathExists, Unsupported, from_os_error

if TYPE_CHECKING:
    from smokebox.engine.images.catalog import CatalogImage, ImageCatalog
    from smokebox.engine.images.layer_store import StoredLayer

_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blob:
    digest: str
    size: int

    def descriptor(self, media_type: str) -> dict[str, object]:
        """Return the descriptor of the blob."""
        return {"mediaType": media_type, "digest": self.digest, "size": self.size}


async def export_oci(
    catalog: ImageCatalog, image: CatalogImage, directory: str, *, name: str = "latest"
) -> str:
    """Write an image as an OCI layout, and return the digest of its manifest.

    Args:
        catalog: The catalog with the layers of the image.
        image: The image.
        directory: Directory to create.
        name: Name of the image in the layout.

    Raises:
        Unsupported: The image is on top of this host, which no other tool has.
        PathExists: The directory exists.
    """
    layers = await _whole_layers(catalog, image)
    try:
        os.makedirs(os.path.join(directory, "blobs", "sha256"))
    except FileExistsError:
        raise PathExists(directory, hint="Pass a directory that does not exist.") from None
    except OSError as error:
        raise from_os_error(error, directory) from error
    try:
        packed = [await _pack(catalog, layer, directory) for layer in layers]
        config = image.config.to_oci([blob.digest for blob in packed])
        manifest = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _write_json(directory, config).descriptor(OCI_CONFIG),
            "layers": [blob.descriptor(OCI_LAYER) for blob in packed],
        }
        written = _write_json(directory, manifest)
        entry = {**written.descriptor(OCI_MANIFEST), "annotations": {_NAME: name}}
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
        _write(os.path.join(directory, "oci-layout"), {"imageLayoutVersion": "1.0.0"})
        # Last: without it, a layout is not one.
        _write(os.path.join(directory, "index.json"), index)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return written.digest


async def _whole_layers(catalog: ImageCatalog, image: CatalogImage) -> list[StoredLayer]:
    """Return all layers of an image, the lowest first."""
    layers: list[StoredLayer] = []
    part: CatalogImage | None = image
    while part is not None:
        for reference in part.layers:
            layer = catalog.layer_store.get(reference.id)
            if layer is None:
                raise ImageError(
                    f"the layer {reference.id} of the image is gone.",
                    hint="Build the image again.",
                    reason="missing",
                    image=image.digest,
                )
            layers.append(layer)
        if not part.base:
            return layers[::-1]
        base, part = part.base, await catalog.get(part.base)
        if part is None:
            break
    raise Unsupported(
        f"the image is on top of {base!r}, which is this host and no image of files.",
        hint="Build it from an image of a registry, or from scratch.",
        operation="export",
    )


async def _pack(catalog: ImageCatalog, layer: StoredLayer, directory: str) -> _Blob:
    digest, size = hashlib.sha256(), 0
    path = os.path.join(directory, "blobs", "sha256", ".packing")
    # In pieces that fit into the page cache.
    with open(path, "xb") as file:  # noqa: ASYNC230
        async for chunk in catalog.layer_store.pack(layer):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
    os.rename(path, os.path.join(os.path.dirname(path), digest.hexdigest()))
    return _Blob(digest=f"sha256:{digest.hexdigest()}", size=size)


def _write_json(directory: str, document: object) -> _Blob:
    data = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
    hexadecimal = hashlib.sha256(data).hexdigest()
    with open(os.path.join(directory, "blobs", "sha256", hexadecimal), "wb") as file:
        file.write(data)
    return _Blob(digest=f"sha256:{hexadecimal}", size=len(data))


def _write(path: str, document: object) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(document, file)
