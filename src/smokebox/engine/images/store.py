"""The image store: which source an image's name belongs to."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.images.directory_image import PREFIX, DirectoryImages
from smokebox.engine.images.host_image import HostImage
from smokebox.engine.images.runtimes import Runtimes, find_deno
from smokebox.engine.images.shelf import Shelf
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.images.image import Image

DEFAULT = "host"


class Source(Protocol):
    """One way to come by images."""

    async def get(self, name: str) -> Image:
        """The image of that whole name; raises `NotFound` with `kind="image"`."""
        ...


class Store:
    """Images by name, from sources by name or prefix.

    A source is registered as a whole name (`host`), as a prefix that ends with a colon
    (`dir:`), or as the empty string, which takes what no other does. `runtimes` lie beneath
    all of them.
    """

    def __init__(self, sources: Mapping[str, Source], runtimes: Runtimes | None = None) -> None:
        self._sources = dict(sources)
        self._runtimes = runtimes

    async def get(self, name: str) -> Image:
        """The image of that name, made if it has to be."""
        image = await self._source(name).get(name)
        return image if self._runtimes is None else await self._runtimes.beneath(image)

    def _source(self, name: str) -> Source:
        prefix, colon, _ = name.partition(":")
        for key in (name, prefix + colon, ""):
            if key in self._sources:
                return self._sources[key]
        raise self._unknown(name)

    def _unknown(self, name: str) -> NotFound:
        shown = {key.removesuffix(":"): _shown(key) for key in sorted(self._sources)}
        near = difflib.get_close_matches(name.partition(":")[0], shown, n=1, cutoff=0.5)
        hint = (
            f"Did you mean {shown[near[0]]!r}?" if near else f"It has: {', '.join(shown.values())}."
        )
        return NotFound(f"the store has no image {name!r}.", hint=hint, kind="image", name=name)


def _shown(key: str) -> str:
    return f"{key}<path>" if key.endswith(":") else key


def open_store(directory: str, *, usr_local: bool = True) -> Store:
    """The store of this host, whose layers are kept in `directory`.

    `usr_local` says whether the image `host` has the host's /usr/local.
    """
    shelf = Shelf(directory)
    return Store(
        {DEFAULT: HostImage(shelf, usr_local=usr_local), PREFIX: DirectoryImages(shelf)},
        Runtimes(shelf, find_deno()),
    )
