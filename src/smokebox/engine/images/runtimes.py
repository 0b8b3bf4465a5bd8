"""Programs that Smokebox brings along for sandboxes: Deno, where its wheel is installed.

They lie beneath everything else of an image, in a directory of their own, so they hide nothing
that the image has, and no PATH leads to them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import shutil
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from smokebox.engine.images import shelf
from smokebox.engine.images.image import Layer

if TYPE_CHECKING:
    from smokebox.engine.images.image import Image
    from smokebox.engine.images.shelf import Shelf

VERSION = 1
DENO = "/opt/smokebox/bin/deno"


class Runtimes:
    """What there is on this host, as a layer that is made once. `deno` is a program, if any."""

    def __init__(self, kept: Shelf, deno: str | None) -> None:
        self._shelf = kept
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
        path = self._shelf.find(digest)
        if path is None:
            fill = functools.partial(_fill, program=self._deno)
            path = await asyncio.to_thread(self._shelf.keep, digest, fill)
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
        shelf.directory(path)
    target = os.path.join(path, os.path.basename(DENO))
    try:
        # Not its 90 MB once more, where it can be had without: a layer is never written to.
        os.link(program, target)
    except OSError:
        shutil.copyfile(program, target)
        os.chmod(target, 0o755)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
