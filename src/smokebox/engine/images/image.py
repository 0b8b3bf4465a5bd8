"""Images, which are read-only layers with a configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
class Healthcheck:
    """A command that tells if a program of an image works. Times are in seconds, 0 for default."""

    test: tuple[str, ...] = ()
    interval: float = 0.0
    timeout: float = 0.0
    start_period: float = 0.0
    retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """A step that an image was made by. An `empty` one added no layer."""

    created: str = ""
    created_by: str = ""
    author: str = ""
    comment: str = ""
    empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The configuration of an image, as the OCI image specification and Docker define it.

    An empty `cwd` or `user` means the default. `entrypoint`, `cmd` and `shell` are None where the
    image sets none. `created` and `author` are texts of the image's maker.
    """

    env: dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    shell: tuple[str, ...] | None = None
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    stop_signal: str = ""
    healthcheck: Healthcheck | None = None
    onbuild: tuple[str, ...] = ()
    architecture: str = ""
    os: str = "linux"
    variant: str = ""
    created: str = ""
    author: str = ""
    history: tuple[HistoryEntry, ...] = ()

    @classmethod
    def from_oci(cls, document: object) -> ImageConfig:
        """Parse the JSON of a config blob; `diff_ids` returns the layers in it.

        Raises:
            ImageError: The document is not a valid configuration.
        """
        raise NotImplementedError

    def to_oci(self, diff_ids: Sequence[str] = ()) -> dict[str, object]:
        """Return the JSON of the config blob of an image with these layers, the lowest first."""
        raise NotImplementedError


def diff_ids(document: object) -> tuple[str, ...]:
    """Return the digests of the unpacked layers that a config blob names, the lowest first.

    Raises:
        ImageError: The document has no valid list of them.
    """
    raise NotImplementedError


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
