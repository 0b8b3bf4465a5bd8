"""Indexes and manifests of images on disk: OCI layouts and `docker save`. They are untrusted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.images.image_config import DIGEST
from smokebox.engine.images.json_fields import Fields, damaged
from smokebox.engine.images.media_types import INDEXES, OCI_LAYER
from smokebox.engine.images.platforms import host_platform
from smokebox.errors import ImageError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.engine.images.image_files import ImageFiles

INDEX, DOCKER = "index.json", "manifest.json"
REFERENCE = "org.opencontainers.image.ref.name"
NAME = "io.containerd.image.name"

_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFile:
    """A layer as a file. `digest` is empty where only its diff_id is known."""

    name: str
    media_type: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDocument:
    """An image on disk: its config, its layers from the lowest, and its names."""

    digest: str
    config: object
    layers: tuple[LayerFile, ...]
    names: tuple[str, ...] = ()
    manifest: str = ""


def read_layout(files: ImageFiles, reference: str | None) -> ImageDocument:
    """Return an image of an OCI layout: the only one, or that of a reference."""
    index = Fields(_parse(files.read(INDEX), INDEX), "index")
    found = index.objects("manifests")
    names = {_name(one) or one.text("digest") for one in found}
    if reference is not None:
        found = [one for one in found if reference in (_name(one), one.text("digest"))]
    if not found:
        raise NotFound(
            f"{files.path} has no image {reference!r}.",
            hint=f"It has: {', '.join(sorted(names)) or 'none'}.",
            kind="image",
            name=reference or "",
        )
    if (
        len(names) > 1
        and reference is None
        and not all(one.values.get("platform") for one in found)
    ):
        raise NotFound(
            f"{files.path} has several images.",
            hint=f"Pass reference=, one of: {', '.join(sorted(names))}.",
            kind="image",
            name="",
        )
    name = _name(found[0])
    return _read_manifest(files, _choose(found, files.path), (name,) if name else ())


def read_docker(files: ImageFiles) -> list[ImageDocument]:
    """Return the images of an archive of `docker save`."""
    found = _parse(files.read(DOCKER), DOCKER)
    images = []
    for image in Fields({"images": found}, DOCKER).objects("images"):
        data = files.read(image.text("Config"))
        layers = tuple(
            LayerFile(name=name, media_type=OCI_LAYER) for name in image.texts("Layers") or ()
        )
        images.append(
            ImageDocument(
                digest=f"sha256:{hashlib.sha256(data).hexdigest()}",
                config=_parse(data, image.text("Config")),
                layers=layers,
                names=image.texts("RepoTags") or (),
            )
        )
    return images


def _read_manifest(files: ImageFiles, descriptor: Fields, names: tuple[str, ...]) -> ImageDocument:
    for _ in range(_MAX_DEPTH):
        digest = descriptor.text("digest")
        data = _read_blob(files, digest)
        document = Fields(_parse(data, digest), "manifest")
        if document.text("mediaType") in INDEXES or "manifests" in document.values:
            descriptor = _choose(document.objects("manifests"), files.path)
            continue
        config = document.fields("config").text("digest")
        layers = tuple(
            LayerFile(
                name=_blob(layer.text("digest")),
                media_type=layer.text("mediaType"),
                digest=layer.text("digest"),
            )
            for layer in document.objects("layers")
        )
        return ImageDocument(
            digest=config,
            config=_parse(_read_blob(files, config), config),
            layers=layers,
            names=names,
            manifest=data.decode(),
        )
    raise damaged("index", f"nested at most {_MAX_DEPTH} times")


def _choose(descriptors: Sequence[Fields], path: str) -> Fields:
    """Return the descriptor for this machine; one without a platform is for any."""
    wanted = host_platform().architecture
    offered = []
    for one in descriptors:
        architecture = one.fields("platform").text("architecture")
        system = one.fields("platform").text("os")
        if (architecture or wanted, system or "linux") == (wanted, "linux"):
            return one
        offered.append(f"{system}/{architecture}")
    raise NotFound(
        f"{path} has no image for linux/{wanted}.",
        hint=f"It is for: {', '.join(offered) or 'nothing'}.",
        kind="image",
        name=path,
    )


def _read_blob(files: ImageFiles, digest: str) -> bytes:
    data = files.read(_blob(digest))
    kind = digest.partition(":")[0]
    if f"{kind}:{hashlib.new(kind, data).hexdigest()}" != digest:
        raise ImageError(
            f"a document of the image was altered: its digest is not {digest}.",
            hint="Copy the whole image again.",
            reason="mismatch",
            image=digest,
        )
    return data


def _blob(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise damaged("digest", "a digest")
    return f"blobs/{digest.replace(':', '/')}"


def _name(descriptor: Fields) -> str:
    annotations = descriptor.fields("annotations")
    return annotations.text(NAME) or annotations.text(REFERENCE)


def _parse(data: bytes, name: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise damaged(name, "JSON") from None
