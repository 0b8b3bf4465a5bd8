"""The image store: finds the source of an image by its name, and adds the runtimes of Smokebox.

Deno, if its wheel is installed, is in the lowest layer of every image. It hides no file of the
image, and is not on PATH.
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
from smokebox.engine.images.image import Layer
from smokebox.engine.images.image_config import DIGEST
from smokebox.engine.images.layer_store import LayerStore, make_directory
from smokebox.engine.images.registry.reference import is_reference
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.image import Image

VERSION = 1
DENO = "/opt/smokebox/bin/deno"
DEFAULT = "host"


class Runtimes:
    """Programs of this host as a layer that is made once. `deno` is a path, if it is installed."""

    def __init__(self, layer_store: LayerStore, deno: str | None) -> None:
        self._layer_store = layer_store
        self._deno = deno

    async def add_to(self, image: Image) -> Image:
        """Return the image with the runtimes as its lowest layer."""
        if self._deno is None:
            return image
        try:
            found = os.stat(self._deno)
        except OSError:
            # This user may not access it.
            return image
        digest = _digest(
            f"runtimes {VERSION} {os.geteuid()} {self._deno} {found.st_size} {found.st_mtime_ns}"
        )
        path = self._layer_store.find(digest)
        if path is None:
            make = functools.partial(_make_layer, program=self._deno)
            path = await asyncio.to_thread(self._layer_store.ensure, digest, make)
        return replace(image, layers=(*image.layers, Layer(path=path)))


@functools.cache
def find_deno() -> str | None:
    """Return the program of the wheel `deno`, if every user may run it."""
    try:
        program = os.path.realpath(import_module("deno").find_deno_bin())
    except (ImportError, FileNotFoundError):
        return None
    return program if os.stat(program).st_mode & 0o005 == 0o005 else None


def _make_layer(into: str, *, program: str) -> None:
    path = into
    for name in os.path.dirname(DENO).strip("/").split("/"):
        path = os.path.join(path, name)
        make_directory(path)
    target = os.path.join(path, os.path.basename(DENO))
    try:
        # Saves 90 MB, and is safe because layers are never written.
        os.link(program, target)
    except OSError:
        shutil.copyfile(program, target)
        os.chmod(target, 0o755)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


class ImageSource(Protocol):
    """A source of images.

    What it gives is current: a catalogued image is looked up before any source is asked.
    """

    async def get(self, name: str, *, scope: str | None = None) -> Image:
        """Return the image of a complete name. Raises `NotFound` with `kind="image"`.

        `scope` is the id of the sandbox that is to start, or None for the operator.
        """
        ...


class ImageStore:
    """Images by name, from sources by name or prefix.

    A source is registered for a complete name (`host`), for a prefix that ends with a colon
    (`dir:`), or for the empty string, which matches all references. The images of `catalog` come
    before those of sources, except of `host` and `dir:`. `runtimes` are added to every image.
    """

    def __init__(
        self,
        sources: Mapping[str, ImageSource],
        runtimes: Runtimes | None = None,
        catalog: ImageCatalog | None = None,
    ) -> None:
        self._sources = dict(sources)
        self._runtimes = runtimes
        self._catalog = catalog
        if catalog is not None:
            catalog.live = self._get_live

    def add_source(self, prefix: str, source: ImageSource) -> None:
        """Add the source of the images whose names start with a prefix."""
        self._sources[prefix] = source

    async def get(self, name: str, *, scope: str | None = None, digest: str = "") -> Image:
        """Return an image, made or pulled if needed.

        Args:
            name: The name as a caller gave it.
            scope: Id of the sandbox that is to start; None for the operator.
            digest: Digest that the sandbox was created from. If it is in the catalog, the name
                is not looked up.
        """
        image = await self._find(name, scope, digest)
        return image if self._runtimes is None else await self._runtimes.add_to(image)

    async def _find(self, name: str, scope: str | None, digest: str) -> Image:
        if self._catalog is None or _is_live(name):
            return await self._source(name).get(name, scope=scope)
        found = await self._catalog.get(digest) if digest else None
        if found is None and digest:
            raise NotFound(
                f"the image {name!r} of the sandbox is gone: this host no longer has {digest}.",
                hint="Add that very image again, or destroy the sandbox.",
                kind="image",
                name=name,
            )
        if found is None:
            found = await self._catalog.find(name, scope=scope)
        if found is not None:
            return await self._catalog.load(found, name)
        return await self._source(name).get(name, scope=scope)

    async def _get_live(self, name: str) -> Image:
        if not _is_live(name):
            raise self._unknown(name)
        return await self._source(name).get(name)

    def _source(self, name: str) -> ImageSource:
        prefix, colon, _ = name.partition(":")
        for key in (name, prefix + colon, *([""] if _is_catalogued(name) else [])):
            if key in self._sources:
                return self._sources[key]
        raise self._unknown(name)

    def _unknown(self, name: str) -> NotFound:
        shown = {
            key.removesuffix(":"): f"{key}NAME" if key.endswith(":") else key
            for key in sorted(self._sources)
            if key
        }
        near = difflib.get_close_matches(name.partition(":")[0], shown, n=1, cutoff=0.5)
        hint = (
            f"Did you mean {shown[near[0]]!r}?" if near else f"It has: {', '.join(shown.values())}."
        )
        return NotFound(f"the store has no image {name!r}.", hint=hint, kind="image", name=name)


def _is_catalogued(name: str) -> bool:
    """Return whether a name is of an image that a key may have pulled, built or loaded."""
    return is_reference(name) or DIGEST.fullmatch(name) is not None


def _is_live(name: str) -> bool:
    """Return whether a name is of an image that follows the state of this host."""
    return name == DEFAULT or name.startswith(PREFIX)


def open_store(
    directory: str,
    *,
    catalog: ImageCatalog | None = None,
    registries: ImageSource | None = None,
    directories: Mapping[str, str] | None = None,
    private: Iterable[str] = (),
    usr_local: bool = True,
) -> ImageStore:
    """Return the image store of this host, with its layers in `directory`.

    Args:
        directory: Directory of the layers.
        catalog: Catalog of the images in the same directory, if there is one.
        registries: Source of images in registries, if there is one.
        directories: Absolute paths of root file systems by name, for the images `dir:NAME`.
        private: Other directories that no image may be, contain or lie inside.
        usr_local: Include /usr/local of the host in the image `host`.
    """
    layer_store = LayerStore(directory) if catalog is None else catalog.layer_store
    return ImageStore(
        {
            DEFAULT: HostImage(layer_store, usr_local=usr_local),
            PREFIX: DirectoryImages(layer_store, directories, private),
            **({} if registries is None else {"": registries}),
        },
        Runtimes(layer_store, find_deno()),
        catalog,
    )
