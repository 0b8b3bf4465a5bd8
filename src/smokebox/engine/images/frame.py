"""The layers above and below those of an image, with what every sandbox needs.

The files of /etc that a sandbox has of its own are above, and mount points below. They are made
once per host and are never part of an image.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.images.etc_files import read_etc_file
from smokebox.engine.images.host_image import MOUNT_POINTS, make_directories
from smokebox.engine.images.image import Layer
from smokebox.engine.images.layer_store import make_directory, make_file

if TYPE_CHECKING:
    from smokebox.engine.images.layer_store import LayerStore

VERSION = 1

# `docker export` leaves these empty, and debootstrap copies those of the host.
_OVERLAID = ("hostname", "hosts", "resolv.conf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFrame:
    """The layers above and below those of an image. `digest` changes with their content."""

    digest: str
    over: Layer
    under: Layer


async def make_frame(layer_store: LayerStore) -> ImageFrame:
    """Return the frame of this host, made if needed."""
    digest = hashlib.sha256(f"frame {VERSION} {os.geteuid()}".encode()).hexdigest()
    directory = layer_store.find(digest)
    if directory is None:
        directory = await asyncio.to_thread(layer_store.ensure, digest, _fill)
    return ImageFrame(
        digest=digest,
        over=Layer(path=os.path.join(directory, "over")),
        under=Layer(path=os.path.join(directory, "under")),
    )


def _fill(into: str) -> None:
    over, under = os.path.join(into, "over"), os.path.join(into, "under")
    make_directory(over)
    make_directory(under)
    make_directory(os.path.join(over, "etc"))
    for name in _OVERLAID:
        make_file(os.path.join(over, "etc", name), read_etc_file(name))
    make_directories(under, MOUNT_POINTS)
