"""Manifests of registries: indexes, images of OCI and of Docker's schema 2, and platforms."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from smokebox.engine.images.media_types import CONFIGS, INDEXES, MANIFESTS
from smokebox.engine.images.platforms import Platform
from smokebox.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

ACCEPT = ", ".join((*INDEXES, *MANIFESTS))
MAX_MANIFEST = 4 << 20
MAX_CONFIG = 8 << 20
MAX_LAYERS = 400
MAX_BLOB = 1 << 40

_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+"
_LAYER = re.compile(
    r"application/vnd\.oci\.image\.layer\.v1\.tar(\+gzip|\+zstd)?"
    r"|application/vnd\.docker\.image\.rootfs\.diff\.tar(\.gzip|\.zstd)?"
)
_FOREIGN = re.compile(r".*(nondistributable|rootfs\.foreign).*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class _PlatformDocument(msgspec.Struct):
    os: str = ""
    architecture: str = ""
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A reference to a blob or manifest. `urls` are other places of it, which are not used."""

    media_type: str
    digest: str
    size: int
    urls: list[str] | None = None
    platform: _PlatformDocument | None = None


class _Index(msgspec.Struct, rename="camel"):
    manifests: list[Descriptor]


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """The manifest of an image for one platform: its config, and its layers from the lowest up."""

    config: Descriptor
    layers: list[Descriptor]


class _Kind(msgspec.Struct, rename="camel"):
    schema_version: int = 0
    media_type: str = ""
    manifests: Any = None
    layers: Any = None
    fs_layers: Any = None


@dataclass(frozen=True, slots=True)
class RegistryDocument:
    """A manifest or index as the registry sent it."""

    media_type: str
    data: bytes

    @property
    def digest(self) -> str:
        """The digest of its bytes."""
        return digest_of(self.data)


def digest_of(data: bytes) -> str:
    """Return the digest of bytes, as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_index(document: RegistryDocument, image: str) -> bool:
    """Return whether a document is an index of manifests, and not a manifest.

    Raises:
        RegistryError: It is neither, or could be read as both.
    """
    kind = _decode(document.data, _Kind, image)
    media_type = kind.media_type or document.media_type
    if kind.schema_version == 1 or kind.fs_layers is not None or media_type.startswith(_SCHEMA_1):
        _refuse(
            image,
            "has a manifest of Docker's schema 1, which is obsolete and not supported",
            "Push it again with a current tool: `skopeo copy --format v2s2` converts it.",
        )
    # CVE-2021-41190: one document must not be an index to one reader and a manifest to another.
    if (kind.manifests is None) == (kind.layers is None):
        _refuse(image, "has a manifest that is neither one image nor an index of images")
    index = kind.manifests is not None
    if media_type in (*INDEXES, *MANIFESTS) and index != (media_type in INDEXES):
        _refuse(image, f"has a manifest that is not the {media_type!r} it says")
    return index


def select_platform(document: RegistryDocument, wanted: Platform, image: str) -> Descriptor:
    """Return the manifest for a platform from an index.

    Raises:
        RegistryError: There is none; the message lists the platforms that there are.
    """
    found = _decode(document.data, _Index, image).manifests
    offered = [
        (Platform(one.platform.os, one.platform.architecture, one.platform.variant), one)
        for one in found
        if one.platform is not None and one.platform.os != "unknown"
    ]
    suitable = [
        (platform, one)
        for platform, one in offered
        if (platform.os, platform.architecture) == (wanted.os, wanted.architecture)
    ]
    for variant in (wanted.variant, ""):
        for platform_, one in suitable:
            if platform_.variant == variant:
                return _checked(one, image)
    # amd64 has levels above the base, and arm64 has only v8; a lower level of arm runs on a
    # higher one.
    lower = [pair for pair in suitable if pair[0].variant <= wanted.variant]
    if lower:
        return _checked(max(lower, key=lambda pair: pair[0].variant)[1], image)
    raise wrong_platform(image, wanted, (str(platform) for platform, _ in offered))


def parse_manifest(document: RegistryDocument, image: str) -> Manifest:
    """Parse the manifest of one image, and check its descriptors.

    Raises:
        RegistryError: It is not valid, or not that of an image that can be run.
    """
    found = _decode(document.data, Manifest, image)
    if found.config.media_type not in CONFIGS:
        _refuse(
            image,
            f"is no container image, but {found.config.media_type!r:.100}",
            "Use an image with a file system, such as 'python:3.12-slim'.",
        )
    _checked(found.config, image)
    if found.config.size > MAX_CONFIG:
        _refuse(image, f"has a configuration of more than {MAX_CONFIG} bytes")
    if not 0 < len(found.layers) <= MAX_LAYERS:
        _refuse(image, f"has {len(found.layers)} layers, not 1 to {MAX_LAYERS}")
    for layer in found.layers:
        if layer.urls or _FOREIGN.fullmatch(layer.media_type):
            _refuse(
                image,
                "has a foreign layer, which is to be fetched from a URL outside of its registry",
                "Use an image whose layers are all in the registry.",
            )
        if not _LAYER.fullmatch(layer.media_type):
            _refuse(image, f"has a layer of the unknown type {layer.media_type!r:.100}")
        _checked(layer, image)
    return found


def check_platform(document: object, wanted: Platform, image: str) -> None:
    """Raise `RegistryError` if the config of an image names another platform."""
    if not isinstance(document, dict):
        _refuse(image, "has a configuration that is not a JSON object")
    found = (document.get("os", "linux"), document.get("architecture", wanted.architecture))
    if found != (wanted.os, wanted.architecture):
        raise wrong_platform(image, wanted, ["/".join(map(str, found))])


def wrong_platform(image: str, wanted: Platform, offered: Iterable[str]) -> RegistryError:
    """Return the error for an image that has no variant for this machine."""
    shown = ", ".join(sorted({name[:40] for name in offered})[:12]) or "no platform"
    return RegistryError(
        f"{image} is not for {wanted}, the platform of this machine; it is for {shown}.",
        hint="Use another tag or image that has this platform, or a machine of that platform.",
        reason="platform",
        image=image,
    )


def _decode(data: bytes, kind: type[T], image: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(
            f"the manifest of {image} is not valid: {error}.",
            hint="Check the reference: the registry does not respond as one, or the image is "
            "damaged.",
            reason="failed",
            image=image,
        ) from error


def _checked(descriptor: Descriptor, image: str) -> Descriptor:
    if not _DIGEST.fullmatch(descriptor.digest):
        _refuse(
            image, f"has a part with the digest {descriptor.digest!r:.100}, which is not sha256"
        )
    if not 0 <= descriptor.size <= MAX_BLOB:
        _refuse(image, f"has a part of {descriptor.size} bytes")
    return descriptor


def _refuse(image: str, problem: str, hint: str = "Push it again with a current tool.") -> NoReturn:
    raise RegistryError(f"{image} {problem}.", hint=hint, reason="unsupported", image=image)
