"""The state of a stage between two steps: its layers, its configuration and the key of both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from smokebox.engine.images.catalog import CatalogImage
from smokebox.engine.images.image import ImageConfig, image_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.engine.images.catalog import LayerReference

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildState:
    """A state of a stage.

    `key` hashes everything that its files depend on. `layers` are on top of the image `base`, the
    uppermost first. `empty` is True for `scratch`.
    """

    key: str
    config: ImageConfig = field(default_factory=ImageConfig)
    layers: tuple[LayerReference, ...] = ()
    base: str = ""
    created_at: float = 0.0

    def with_step(
        self, key: str, layers: Sequence[LayerReference], created_at: float
    ) -> BuildState:
        """Return the state after a step that added layers."""
        return replace(
            self,
            key=key,
            layers=(*layers, *self.layers),
            created_at=max(self.created_at, created_at),
        )

    def image(self, *, source: str = "build") -> CatalogImage:
        """Return it as an image of the catalog."""
        digest = image_digest(self.config, [one.id for one in self.layers], self.base)
        return CatalogImage(
            digest=digest,
            config=self.config,
            layers=self.layers,
            base=self.base,
            source=source,
            created_at=self.created_at,
        )


def step_key(parent: str, *parts: object) -> str:
    """Hash what a step depends on: the state before it, and its own parts."""
    text = json.dumps([VERSION, parent, *parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
