"""Pulls that run: one for each scope and manifest, shared by all callers that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.images.catalog import CatalogImage, LayerReference
from smokebox.engine.images.image import ImageConfig
from smokebox.engine.images.registry.layers import LayerPull, TrustedLayers
from smokebox.errors import Aborted

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.layer_store import StoredLayer
    from smokebox.engine.images.registry.client import RegistryClient
    from smokebox.engine.images.registry.manifests import Manifest, RegistryDocument
    from smokebox.engine.images.registry.reference import Reference
    from smokebox.engine.images.usage import Charge, Charging
    from smokebox.types import LayerProgress

_LAYERS_AT_ONCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedImage:
    """An image whose manifest and configuration were read, before its layers are.

    `names` are those that it gets in the catalog.
    """

    reference: Reference
    manifest: RegistryDocument
    parsed: Manifest
    config: object
    config_digest: str
    diff_ids: tuple[str, ...]
    names: tuple[str, ...]


class SharedPulls:
    """The pulls of one engine that run."""

    def __init__(self, catalog: ImageCatalog) -> None:
        self._catalog = catalog
        self._layer_store = catalog.layer_store
        self._running: dict[tuple[str, str, str], _SharedPull] = {}
        # By registry, the layers that pulls which failed have downloaded.
        self._sent: dict[str, set[tuple[str, str]]] = {}

    async def run(
        self,
        resolved: ResolvedImage,
        scope: str,
        open_client: Callable[[], AbstractAsyncContextManager[RegistryClient]],
        progress: Callable[[LayerProgress], None] | None,
        charging: Charging | None = None,
    ) -> CatalogImage:
        """Pull the layers of an image and record it, or join the pull that does.

        The pull is cancelled when all its callers are.
        """
        key = (scope, resolved.reference.name, resolved.manifest.digest)
        pull = self._running.get(key)
        if pull is None or pull.ended:
            pull = self._running[key] = _SharedPull()
            pull.task = asyncio.create_task(
                self._pull(resolved, scope, open_client, pull, charging)
            )
            pull.task.add_done_callback(lambda _: self._forget(key))
        image = await pull.join(progress)
        # Another caller may have come by another tag.
        for name in resolved.names:
            await self._catalog.name(name, image.digest, scope=scope)
        return image

    def _forget(self, key: tuple[str, str, str]) -> None:
        if self._running[key].ended:
            del self._running[key]

    async def aclose(self) -> None:
        """Cancel all pulls, and wait for their end."""
        tasks = [pull.task for pull in self._running.values() if pull.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _pull(
        self,
        resolved: ResolvedImage,
        scope: str,
        open_client: Callable[[], AbstractAsyncContextManager[RegistryClient]],
        pull: _SharedPull,
        charging: Charging | None,
    ) -> CatalogImage:
        registry = resolved.reference.registry
        trusted = await TrustedLayers.find(
            self._catalog, scope=scope, registry=registry, sent=self._sent.get(registry, ())
        )
        try:
            return await self._record(resolved, scope, open_client, pull, charging, trusted)
        except BaseException:
            self._sent.setdefault(registry, set()).update(trusted.added)
            raise

    async def _record(
        self,
        resolved: ResolvedImage,
        scope: str,
        open_client: Callable[[], AbstractAsyncContextManager[RegistryClient]],
        pull: _SharedPull,
        charging: Charging | None,
        trusted: TrustedLayers,
    ) -> CatalogImage:
        """Pull the layers, and record the image."""
        async with contextlib.AsyncExitStack() as stack:
            charge = await stack.enter_async_context(charging()) if charging else None
            stack.enter_context(self._catalog.lease())
            async with open_client() as client:
                stored = await self._layers(resolved, client, trusted, pull, charge)
            at = time.time()
            image = CatalogImage(
                digest=resolved.config_digest,
                config=ImageConfig.from_oci(resolved.config),
                layers=tuple(LayerReference(id=one.id) for one in reversed(stored)),
                source=str(resolved.reference),
                manifest=resolved.manifest.data.decode(),
                created_at=at,
                used_at=at,
                size=sum(one.bytes or 0 for one in stored),
            )
            await self._catalog.put(image, names=resolved.names, scope=scope)
        return image

    async def _layers(
        self,
        resolved: ResolvedImage,
        client: RegistryClient,
        trusted: TrustedLayers,
        pull: _SharedPull,
        charge: Charge | None,
    ) -> list[StoredLayer]:
        """Pull all layers, a few at once, begun from the lowest up."""
        places = asyncio.Semaphore(_LAYERS_AT_ONCE)
        ids = resolved.diff_ids
        works = [
            LayerPull(client, self._layer_store, blob, ids[at], ids[:at], pull.report, charge)
            for at, blob in enumerate(resolved.parsed.layers)
        ]

        async def run(work: LayerPull) -> StoredLayer:
            async with places:
                return await work.run(trusted)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(work)) for work in works]
        except* Exception as errors:
            raise _first(errors) from None
        return [task.result() for task in tasks]


class _SharedPull:
    """A running pull, its progress, and those who wait for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[CatalogImage] | None = None
        self._states: dict[str, LayerProgress] = {}
        self._listeners: list[Callable[[LayerProgress], None]] = []
        self._waiting = 0
        self._cancelled = False

    @property
    def ended(self) -> bool:
        """True once it cannot be joined."""
        return self._cancelled or (self.task is not None and self.task.done())

    def report(self, progress: LayerProgress) -> None:
        """Pass the progress of a layer on."""
        self._states[progress.digest] = progress
        for listener in self._listeners:
            listener(progress)

    async def join(self, progress: Callable[[LayerProgress], None] | None) -> CatalogImage:
        """Wait for the image; the last who stops waiting cancels the pull."""
        assert self.task is not None
        if progress is not None:
            for state in self._states.values():
                progress(state)
            self._listeners.append(progress)
        self._waiting += 1
        try:
            await asyncio.wait({self.task})
            if self.task.cancelled():
                raise Aborted(
                    "the pull was cancelled.",
                    hint="Pull it again: layers that are complete are kept.",
                    reason="cancelled",
                )
            return self.task.result()
        finally:
            self._waiting -= 1
            if progress is not None:
                self._listeners.remove(progress)
            if not self._waiting and not self.task.done():
                self._cancelled = True
                self.task.cancel()
                await asyncio.wait({self.task})


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group: the others are of layers that were cancelled with it."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
