"""Base images of a build, as the states that its stages start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.images.build.plan import SCRATCH
from smokebox.engine.images.build.state import BuildState, step_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.store import ImageStore


class BaseImages:
    """Finds what FROM and --from name: `scratch`, an image of the catalog, or one of a source.

    A source that adds to the catalog, such as a registry, is asked first for a name that the
    catalog does not have. `check` raises for a name that the build may not use.
    """

    def __init__(
        self,
        catalog: ImageCatalog,
        store: ImageStore,
        check: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._check = check

    async def find(self, name: str, *, scope: str | None) -> BuildState:
        """Return the state of a base image.

        Raises:
            NotFound: There is no such image for the scope.
        """
        if name == SCRATCH:
            return BuildState(key=step_key("", SCRATCH))
        if self._check is not None:
            await self._check(name)
        found = await self._catalog.find(name, scope=scope)
        if found is None:
            image = await self._store.get(name, scope=scope)
            found = await self._catalog.get(image.digest)
            if found is None:
                # An image of this host, such as `host`.
                return BuildState(
                    key=step_key("", "base", image.digest), config=image.config, base=name
                )
        return BuildState(
            key=step_key("", "image", found.digest),
            config=found.config,
            layers=found.layers,
            base=found.base,
            created_at=found.created_at,
        )
