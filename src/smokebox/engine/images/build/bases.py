"""Base images of a build, as the states that its stages start from."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from smokebox.engine.images.build.plan import SCRATCH
from smokebox.engine.images.build.state import BuildState, step_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.store import ImageStore
    from smokebox.wire.builds import BuildEvent

RECIPE = "recipe:"
"""Prefix of the images that Smokebox has Dockerfiles of."""

RecipeStream: TypeAlias = "Callable[[str], AsyncGenerator[BuildEvent, None]]"
"""Builds a recipe that is not known yet, and yields the progress."""


class BaseImages:
    """Finds what FROM and --from name: `scratch`, an image of the catalog, or one of a source.

    A source that adds to the catalog, such as a registry, is asked first for a name that the
    catalog does not have. `allowed` returns the name or digest to look up for a name, and raises
    for one that the build may not use.
    """

    def __init__(
        self,
        catalog: ImageCatalog,
        store: ImageStore,
        allowed: Callable[[str], Awaitable[str]] | None = None,
        recipes: RecipeStream | None = None,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._allowed = allowed
        self._recipes = recipes

    async def find(
        self, name: str, *, scope: str | None, report: Callable[[BuildEvent], Awaitable[None]]
    ) -> BuildState:
        """Return the state of a base image. A recipe is built with progress if it is not known.

        Raises:
            NotFound: There is no such image for the scope.
        """
        if name == SCRATCH:
            return BuildState(key=step_key("", SCRATCH))
        if self._allowed is not None:
            name = await self._allowed(name)
        found = await self._catalog.find(name, scope=scope)
        if found is None:
            await self._build_recipe(name, report)
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

    async def _build_recipe(
        self, name: str, report: Callable[[BuildEvent], Awaitable[None]]
    ) -> None:
        if self._recipes is None or not name.startswith(RECIPE):
            return
        async with contextlib.aclosing(self._recipes(name)) as events:
            async for event in events:
                if event.kind != "image":
                    await report(replace(event, base=event.base or name))
