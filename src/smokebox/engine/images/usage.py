"""Disk use of images by owner: layers, cached build steps, cache mounts and uploaded contents.

An owner's pulls, builds and uploads are charged as they write, so that a ceiling holds before it
is exceeded, also while several of them run.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from smokebox.engine.images.build.cache import BuildCache
    from smokebox.engine.images.build.context import ContentStore
    from smokebox.engine.images.build.mounts import CacheDirectories
    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.layer_store import StoredLayer
    from smokebox.errors import LimitReached

Refusal: TypeAlias = "Callable[[int, int], LimitReached]"
"""Called with the bytes that are used and those wanted; returns the error."""

_FRESH_SECONDS = 5.0


class _Account:
    """Use of an owner, and the bytes that its running work has added so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.refreshing = asyncio.Lock()
        self.measured_at = 0.0
        self.used = 0
        self.adding = 0
        # Added by work that ended while the use was being measured.
        self.ended = 0
        self.layers: set[str] = set()
        # Layers of pulls and builds that did not become an image.
        self.loose: set[str] = set()


class Charge:
    """Counts what one pull, build or upload adds. Safe from any thread."""

    def __init__(self, account: _Account, ceiling: float, refuse: Refusal) -> None:
        self._account = account
        self._ceiling = ceiling
        self._refuse = refuse
        self.added = 0
        self.refused = False

    @property
    def left(self) -> int:
        """Bytes that may still be added."""
        return max(0, int(self._ceiling) - self._account.used - self._account.adding)

    def add(self, size: int) -> None:
        """Count bytes that are about to be written. Raises `LimitReached`."""
        with self._account.lock:
            if size > self.left:
                self.refused = True
                used = self._account.used + self._account.adding
                raise self._refuse(used, size)
            self._account.adding += size
            self.added += size

    def add_layer(self, layer: StoredLayer, *, counted: bool = False) -> None:
        """Count a layer in the store, unless the owner has it or its bytes are `counted`."""
        known = layer.id in self._account.layers
        self._account.loose.add(layer.id)
        if not known and not counted:
            self.add(layer.bytes or 0)
        self._account.layers.add(layer.id)


Charging: TypeAlias = Callable[[], AbstractAsyncContextManager[Charge]]
"""Begins to charge the owner of a request."""


class ImageUsage:
    """Disk use of the images of each owner. Owners are scopes, of which one tenant may have two."""

    def __init__(
        self,
        catalog: ImageCatalog,
        steps: BuildCache,
        content: ContentStore,
        caches: CacheDirectories,
    ) -> None:
        self._catalog = catalog
        self._steps = steps
        self._content = content
        self._caches = caches
        self._accounts: dict[frozenset[str], _Account] = {}

    async def of(self, scopes: Iterable[str]) -> int:
        """Return the bytes that the images, builds and uploads of an owner take."""
        account = self._account(frozenset(scopes))
        await self._refresh(account, frozenset(scopes))
        return account.used

    @contextlib.asynccontextmanager
    async def charge(
        self, scopes: Iterable[str], ceiling: float, refuse: Refusal
    ) -> AsyncIterator[Charge]:
        """Charge an owner for what is added in the block. `refuse` makes the error above it.

        Above the ceiling, caches of the owner's builds are removed, so that another try may work.
        """
        owner = frozenset(scopes)
        account = self._account(owner)
        if time.monotonic() - account.measured_at > _FRESH_SECONDS:
            await self._refresh(account, owner)
        charge = Charge(account, ceiling, refuse)
        try:
            yield charge
        finally:
            with account.lock:
                account.adding -= charge.added
                account.used += charge.added
                account.ended += charge.added
            if charge.refused:
                await self._make_room(owner)

    def forget(self) -> None:
        """Measure again before the next charge, because something was removed."""
        for account in self._accounts.values():
            account.measured_at = 0.0

    async def _make_room(self, owner: frozenset[str]) -> None:
        """Remove what an owner can make again, and layers that no image of anyone has."""
        for scope in owner:
            await self._steps.clear(scope)
            await asyncio.to_thread(self._content.clear, scope=scope)
            await self._caches.clear(scope)
        await self._catalog.sweep()
        self.forget()

    def _account(self, owner: frozenset[str]) -> _Account:
        return self._accounts.setdefault(owner, _Account())

    async def _refresh(self, account: _Account, owner: frozenset[str]) -> None:
        async with account.refreshing:
            account.ended = 0
            await self._catalog.remove_ungranted()
            store = self._catalog.layer_store
            account.loose = {id for id in account.loose if store.get(id) is not None}
            account.layers = await self._catalog.owned_layers(owner) | account.loose
            size = 0
            for id in account.layers:
                if (layer := store.get(id)) is not None:
                    size += (await store.measure(layer)).bytes or 0
            for scope in owner:
                size += await asyncio.to_thread(self._content.usage, scope=scope)
                size += await asyncio.to_thread(self._caches.usage, scope)
            with account.lock:
                account.used = size + account.ended
                account.measured_at = time.monotonic()
