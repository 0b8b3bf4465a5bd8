"""The image store: maps the name of an image to its source, and adds Smokebox's own programs.

Deno, where its wheel is installed, becomes the lowest layer of every image, in a directory of its
own. It hides nothing that the image has, and is not on PATH.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import hashlib
import os
import shutil
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.images.directory_image import PREFIX, DirectoryImages
from smokebox.engine.images.host_image import HostImage
from smokebox.engine.images.image import Layer, LayerStore, make_directory
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.images.image import Image

VERSION = 1
DENO = "/opt/smokebox/bin/deno"
DEFAULT = "host"


class Runtimes:
    """What there is on this host, as a layer that is made once. `deno` is a program, if any."""

    def __init__(self, kept: LayerStore, deno: str | None) -> None:
        self._layer_store = kept
        self._deno = deno

    async def beneath(self, image: Image) -> Image:
        """The image with the programs beneath it."""
        if self._deno is None:
            return image
        try:
            found = os.stat(self._deno)
        except OSError:
            # Who may not pass to it does without.
            return image
        told = f"runtimes {VERSION} {os.geteuid()} {self._deno} {found.st_size} {found.st_mtime_ns}"
        digest = _digest(told)
        path = self._layer_store.find(digest)
        if path is None:
            fill = functools.partial(_fill, program=self._deno)
            path = await asyncio.to_thread(self._layer_store.keep, digest, fill)
        layers = (*image.layers, Layer(path=path))
        return replace(image, layers=layers, digest=_digest(f"{image.digest} {digest}"))


@functools.cache
def find_deno() -> str | None:
    """The program of the wheel `deno`, if everybody may run it."""
    try:
        program = os.path.realpath(import_module("deno").find_deno_bin())
    except (ImportError, FileNotFoundError):
        return None
    return program if os.stat(program).st_mode & 0o005 == 0o005 else None


def _fill(into: str, *, program: str) -> None:
    path = into
    for name in os.path.dirname(DENO).strip("/").split("/"):
        path = os.path.join(path, name)
        make_directory(path)
    target = os.path.join(path, os.path.basename(DENO))
    try:
        # Not its 90 MB once more, where it can be had without: a layer is never written to.
        os.link(program, target)
    except OSError:
        shutil.copyfile(program, target)
        os.chmod(target, 0o755)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


class ImageSource(Protocol):
    """One way to come by images."""

    async def get(self, name: str) -> Image:
        """The image of that whole name; raises `NotFound` with `kind="image"`."""
        ...


class ImageStore:
    """Images by name, from sources by name or prefix.

    A source is registered as a whole name (`host`), as a prefix that ends with a colon
    (`dir:`), or as the empty string, which takes what no other does. `runtimes` lie beneath
    all of them.
    """

    def __init__(
        self, sources: Mapping[str, ImageSource], runtimes: Runtimes | None = None
    ) -> None:
        self._sources = dict(sources)
        self._runtimes = runtimes

    async def get(self, name: str) -> Image:
        """The image of that name, made if it has to be."""
        image = await self._source(name).get(name)
        return image if self._runtimes is None else await self._runtimes.beneath(image)

    def _source(self, name: str) -> ImageSource:
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


def open_store(directory: str, *, usr_local: bool = True) -> ImageStore:
    """The store of this host, whose layers are kept in `directory`.

    `usr_local` says whether the image `host` has the host's /usr/local.
    """
    layer_store = LayerStore(directory)
    return ImageStore(
        {
            DEFAULT: HostImage(layer_store, usr_local=usr_local),
            PREFIX: DirectoryImages(layer_store),
        },
        Runtimes(layer_store, find_deno()),
    )
