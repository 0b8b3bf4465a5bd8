"""Images, which are read-only layers with a configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.images.image_config import (
    Healthcheck,
    HistoryEntry,
    ImageConfig,
    diff_ids,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DEFAULT_CWD",
    "DEFAULT_USER",
    "Healthcheck",
    "HistoryEntry",
    "Image",
    "ImageConfig",
    "Layer",
    "diff_ids",
    "image_digest",
]

DEFAULT_CWD = "/workspace"
DEFAULT_USER = "root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A read-only directory of the host, seen at `target`.

    Layers of one target are stacked, the uppermost first, with the upper layer of the sandbox on
    top. `target` is `/`, or a directory in a layer of `/`. `owner` is the host id that files of
    root have in `path`; other ids follow it.
    """

    path: str
    target: str = "/"
    owner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A stack of layers plus a configuration, ready to start a sandbox from.

    `digest` identifies the content: a sandbox keeps the one that it was created from. The images
    of this host (`host`, `dir:NAME`) have the digest of their current state.
    """

    name: str
    digest: str
    layers: tuple[Layer, ...]
    config: ImageConfig = field(default_factory=ImageConfig)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of every command."""
        return self.config.env

    @property
    def cwd(self) -> str:
        """Working directory of a sandbox that names none."""
        return self.config.cwd or DEFAULT_CWD

    @property
    def user(self) -> str:
        """User of commands of a sandbox that names none."""
        return self.config.user or DEFAULT_USER


def image_digest(config: ImageConfig, layers: Sequence[str], base: str = "") -> str:
    """Return a digest for an image that has no config blob, from its layers' ids and its base."""
    document = [config.to_oci(), list(layers), base]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
