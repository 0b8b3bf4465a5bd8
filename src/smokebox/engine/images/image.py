"""An image: read-only layers and how to start in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A read-only directory of the host, seen at `target`.

    Layers of one target are stacked, the uppermost first, and what the sandbox writes goes
    on top. `target` is `/`, or a directory that a layer of `/` has.
    """

    path: str
    target: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A stack of layers plus a configuration. `digest` changes whenever one of them does."""

    name: str
    digest: str
    layers: tuple[Layer, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/workspace"
    user: str = "root"


class ImageStore(Protocol):
    """Where images come from. The layers of one that was given stay until it is released."""

    async def get(self, name: str) -> Image:
        """The image of that name; raises `NotFound` with `kind="image"`."""
        ...
