"""Bodies and queries of requests about builds and the contents that they need."""

from __future__ import annotations

from typing import Any

import msgspec

from smokebox.wire.builds import ContextEntry
from smokebox.wire.requests import Body, Limits, Positive, Query


class FindContents(Body):
    """SHA-256 digests of files of a build context, in hexadecimal."""

    digests: list[str]


class PutContent(Query):
    """The SHA-256 digest of the content in the body, in hexadecimal."""

    digest: str


class BuildImage(Body):
    """A Dockerfile to build, with the entries of its context, whose contents were uploaded.

    `file` is the name of the Dockerfile in errors. `secrets` are bytes in Base64 by id. `egress`
    is what RUN and ADD may reach. `mirrors` makes the package mirrors of the host known to RUN.
    `share` lets every key use the image, and needs an administrator's key.
    """

    dockerfile: str
    file: str = "Dockerfile"
    context: list[ContextEntry] = msgspec.field(default_factory=list)
    names: list[str] = msgspec.field(default_factory=list)
    build_args: dict[str, str] = msgspec.field(default_factory=dict)
    target: str | None = None
    platform: str | None = None
    secrets: dict[str, bytes] = msgspec.field(default_factory=dict)
    no_cache: bool = False
    keep: bool = False
    mirrors: bool = False
    share: bool = False
    timeout: Positive | None = None
    limits: Limits | None = None
    egress: dict[str, Any] | list[str] | None = None


class BuildRecipe(Body):
    """A recipe to build, such as `recipe:python`. `no_cache` builds a known one again."""

    recipe: str
    no_cache: bool = False
