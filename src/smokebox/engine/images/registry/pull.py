"""Pulls of images from registries into the layer store and the catalog.

An image of the catalog starts without its registry. A scope may use it only after it could pull
it itself: the registry let it read the manifest, and each layer was sent to it or is known to be
of that registry. Knowing a digest is not enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from smokebox.engine.images.catalog import SHARED, unknown
from smokebox.engine.images.image import diff_ids
from smokebox.engine.images.image_config import DIGEST
from smokebox.engine.images.platforms import host_platform
from smokebox.engine.images.registry.access import RegistryAccess, RegistrySettings
from smokebox.engine.images.registry.client import RegistryClient
from smokebox.engine.images.registry.manifests import (
    MAX_CONFIG,
    check_platform,
    is_index,
    parse_manifest,
    select_platform,
)
from smokebox.engine.images.registry.reference import (
    Reference,
    parse_reference,
    recipe_in_place_of,
)
from smokebox.engine.images.registry.shared_pull import ResolvedImage, SharedPulls
from smokebox.engine.images.registry.transport import RegistryTransport
from smokebox.errors import (
    DeadlineExceeded,
    Forbidden,
    ImageError,
    NotFound,
    RegistryError,
    SmokeboxError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from smokebox.engine.images.catalog import CatalogImage, ImageCatalog
    from smokebox.engine.images.image import Image
    from smokebox.engine.images.registry.access import Credentials
    from smokebox.foundation.http1.dial import Resolver
    from smokebox.types import LayerProgress

PullPolicy = Literal["missing", "always"]
"""`missing` uses an image of the catalog if the caller may; `always` resolves its tag again."""

PULL_SECONDS = 3600.0
_HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """An image that the caller may use. `note` tells why its tag was not resolved, if it was not.

    `reference` is pinned to the digest of its manifest. `pulled` is False if it was known.
    """

    image: CatalogImage
    reference: str
    pulled: bool
    note: str = ""


AccessOf: TypeAlias = "Callable[[str, str | None], RegistryAccess]"
"""Called with an image and the id of the sandbox that starts; returns the rights to pull it."""


def full_access(image: str, scope: str | None) -> RegistryAccess:
    """Return the rights of the operator, for engines that serve one user."""
    return RegistryAccess(server_credentials=True, private=True)


class RegistryImages:
    """Images from registries: the image source of every name that no other source has.

    Args:
        settings: Registries of the operator.
        catalog: Where pulled images are recorded, and their layers unpacked.
        access_of: Rights to pull for a sandbox that starts.
        resolver: Looks up addresses, instead of the system.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        catalog: ImageCatalog,
        access_of: AccessOf = full_access,
        *,
        resolver: Resolver | None = None,
    ) -> None:
        self.settings = settings
        self._catalog = catalog
        self._access_of = access_of
        self._resolver = resolver
        self._pulls = SharedPulls(catalog)

    async def get(self, name: str, *, scope: str | None = None) -> Image:
        """Return the image of a reference for a sandbox that starts; pull it if needed."""
        access = self._access_of(name, scope)
        # A key may have images that are not granted by the prefix of its sandboxes.
        known = await self._find(name, access.scope)
        if known is not None:
            return await self._catalog.load(known, name)
        if DIGEST.fullmatch(name):
            raise unknown(name)
        try:
            result = await self.pull(name, access, policy="missing")
        except (NotFound, RegistryError) as error:
            if difflib.get_close_matches(name, (_HOST,), cutoff=0.5):
                error.hint = f"Did you mean {_HOST!r}, the files of this host? {error.hint}"
            if recipe := recipe_in_place_of(name):
                error.hint = f"Use {recipe!r} in its place: it has what agents expect. {error.hint}"
            if isinstance(error, RegistryError):
                error.message = f"the image {name!r} cannot be pulled: {error.message}"
            raise
        return await self._catalog.load(result.image, name)

    async def pull(
        self,
        image: str,
        access: RegistryAccess,
        *,
        policy: PullPolicy = "always",
        share: bool = False,
        timeout: float = PULL_SECONDS,
        progress: Callable[[LayerProgress], None] | None = None,
    ) -> PullResult:
        """Pull an image, and let the caller's scope start sandboxes from it.

        If the registry does not respond and the caller may use an image of that name that was
        pulled before, that one is returned with a note.

        Args:
            image: Reference as users write it.
            access: Rights of the caller.
            share: Let every scope use the image.
            policy: `missing` does not contact the registry for an image that the caller may use.
            timeout: Seconds for the whole pull.
            progress: Called with the progress of each layer.

        Raises:
            InvalidOption: The reference is not valid.
            NotFound: The registry has no such image.
            RegistryError: The registry refuses or fails, or the image is not usable here.
            ImageError: A layer is damaged or unsafe.
            Forbidden: The caller may not reach a host or address of the registry.
            DeadlineExceeded: It took longer than `timeout`.
        """
        reference = parse_reference(image, self.settings.default)
        try:
            async with asyncio.timeout(timeout) as deadline:
                result = await self._pull(reference, access, policy, progress)
                if share:
                    names = (catalog_name(reference), result.reference)
                    await self._name(names, result.image.digest, SHARED)
                return result
        except TimeoutError as error:
            if isinstance(error, SmokeboxError) or not deadline.expired():
                raise
            raise DeadlineExceeded(
                f"the pull of {reference} timed out after {timeout:g} s.",
                hint="Pull it again: layers that are complete are kept.",
                operation="pull",
                timeout=timeout,
            ) from None

    def catalog_name(self, image: str) -> str:
        """Return the name that a reference has in the catalog. Raises `InvalidOption`."""
        return catalog_name(parse_reference(image, self.settings.default))

    async def find(self, image: str, scope: str | None) -> CatalogImage | None:
        """Return the image of a reference that a scope may use, if its layers are all stored."""
        return await self._find(self.catalog_name(image), scope)

    @contextlib.asynccontextmanager
    async def open_client(
        self, reference: Reference, access: RegistryAccess, *, mirror: str | None = None
    ) -> AsyncIterator[RegistryClient]:
        """Open a client of a reference's repository, at its registry or a mirror of it."""
        transport = RegistryTransport(self.settings, access, resolver=self._resolver)
        try:
            name = mirror or reference.registry
            credentials = await self._credentials(name, access)
            yield RegistryClient(transport, reference, authority=mirror, credentials=credentials)
        finally:
            transport.close()

    async def aclose(self) -> None:
        """Cancel the pulls that run. Layers that are complete stay."""
        await self._pulls.aclose()

    async def _pull(
        self,
        reference: Reference,
        access: RegistryAccess,
        policy: PullPolicy,
        progress: Callable[[LayerProgress], None] | None,
    ) -> PullResult:
        name = catalog_name(reference)
        known = await self._find(name, access.scope)
        if known is not None and (policy == "missing" or reference.digest is not None):
            pinned = await self._pinned(reference, known, access.scope)
            return PullResult(image=known, reference=pinned, pulled=False)
        mirrors: list[str | None] = list(self.settings.of(reference.registry).mirrors)
        for mirror in [*mirrors, None]:
            try:
                return await self._pull_from(mirror, reference, access, progress)
            except (RegistryError, NotFound, Forbidden, ImageError) as error:
                if mirror is not None:
                    continue
                unreachable = isinstance(error, RegistryError) and error.retryable
                if known is None or not unreachable:
                    raise
                note = f"{error.message} The image of the last pull is used."
                pinned = await self._pinned(reference, known, access.scope)
                return PullResult(image=known, reference=pinned, pulled=False, note=note)
        raise AssertionError("unreachable")

    async def _pull_from(
        self,
        mirror: str | None,
        reference: Reference,
        access: RegistryAccess,
        progress: Callable[[LayerProgress], None] | None,
    ) -> PullResult:
        async with self.open_client(reference, access, mirror=mirror) as client:
            resolved = await self._resolve(client)
        pinned = f"{reference.name}@{resolved.manifest.digest}"
        known = await self._find(pinned, access.scope)
        if known is not None:
            names = (catalog_name(reference), pinned)
            await self._name(names, known.digest, access.scope)
            return PullResult(image=known, reference=pinned, pulled=False)
        image = await self._pulls.run(
            resolved,
            access.scope,
            lambda: self.open_client(reference, access, mirror=mirror),
            progress,
            access.charging,
        )
        return PullResult(image=image, reference=pinned, pulled=True)

    async def _resolve(self, client: RegistryClient) -> ResolvedImage:
        """Resolve a tag or digest to the manifest for this machine, and get its configuration."""
        reference, image = client.reference, client.image
        platform = host_platform()
        names = {catalog_name(reference)}
        document = await client.manifest(reference.target)
        names.add(f"{reference.name}@{document.digest}")
        if is_index(document, image):
            chosen = select_platform(document, platform, image)
            document = await client.manifest(chosen.digest, size=chosen.size)
            names.add(f"{reference.name}@{document.digest}")
            if is_index(document, image):
                raise RegistryError(
                    f"{image} has an index within an index.",
                    hint="Push it again with a current tool.",
                    reason="unsupported",
                    image=image,
                )
        manifest = parse_manifest(document, image)
        data = await client.blob(manifest.config, MAX_CONFIG)
        config = _parse_config(data, image)
        check_platform(config, platform, image)
        ids = diff_ids(config)
        if len(ids) != len(manifest.layers):
            raise RegistryError(
                f"{image} has {len(manifest.layers)} layers, and its configuration names "
                f"{len(ids)}.",
                hint="The image is damaged: push it again.",
                reason="failed",
                image=image,
            )
        return ResolvedImage(
            reference=reference,
            manifest=document,
            parsed=manifest,
            config=config,
            config_digest=manifest.config.digest,
            diff_ids=ids,
            names=tuple(sorted(names)),
        )

    async def _find(self, name: str, scope: str | None) -> CatalogImage | None:
        image = await self._catalog.find(name, scope=scope)
        layer_store = self._catalog.layer_store
        if image is None or any(layer_store.get(one.id) is None for one in image.layers):
            return None
        return image

    async def _pinned(self, reference: Reference, image: CatalogImage, scope: str) -> str:
        """Return a reference with the digest of a known image's manifest, if it was pulled."""
        names = await self._catalog.names(image.digest, scope=scope)
        pinned = (one for one in names if one.startswith(f"{reference.name}@"))
        return next(pinned, catalog_name(reference))

    async def _name(self, names: Iterable[str], digest: str, scope: str) -> None:
        """Name an image in a scope, which may use it."""
        for name in names:
            await self._catalog.name(name, digest, scope=scope)
        await self._catalog.grant(digest, scope)

    async def _credentials(self, registry: str, access: RegistryAccess) -> Credentials | None:
        own = access.credentials.get(registry)
        if own is not None or not access.server_credentials:
            return own
        return await asyncio.to_thread(self.settings.of(registry).credentials, registry)


def catalog_name(reference: Reference) -> str:
    """Return the name of a reference in the catalog: its digest decides, if it has one."""
    if reference.digest is not None:
        return f"{reference.name}@{reference.digest}"
    return str(reference)


def _parse_config(data: bytes, image: str) -> object:
    try:
        document: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RegistryError(
            f"the configuration of {image} is not valid JSON.",
            hint="The image is damaged: push it again.",
            reason="failed",
            image=image,
        ) from error
    return document
