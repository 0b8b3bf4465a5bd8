"""The images `dir:<absolute path>`: root file systems unpacked into directories."""

from __future__ import annotations

import asyncio
import hashlib
import os

from smokebox.engine.images.etc_files import read_etc_file
from smokebox.engine.images.host_image import MOUNT_POINTS, default_env, make_directories
from smokebox.engine.images.image import Image, Layer, LayerStore, make_directory, make_file
from smokebox.errors import InvalidOption, NotFound

PREFIX = "dir:"
VERSION = 1

# Every root file system has one of these.
_EXPECTED = ("usr", "bin", "etc", "lib")
# `docker export` leaves these empty, and debootstrap copies those of the host.
_OVERLAID = ("hostname", "hosts", "resolv.conf")


class DirectoryImages:
    """Images that are directories, made for example by debootstrap or `docker export`.

    The directory is used in place and never written; do not change it while a sandbox uses it.
    Directories that a sandbox needs, such as /proc and /workspace, are in a layer below it.
    """

    def __init__(self, layer_store: LayerStore) -> None:
        self._layer_store = layer_store

    async def get(self, name: str) -> Image:
        """Return the image of a name such as `dir:/srv/bookworm`."""
        path = self._check(name)
        frame = hashlib.sha256(f"frame {VERSION} {os.geteuid()}".encode()).hexdigest()
        directory = self._layer_store.find(frame)
        if directory is None:
            directory = await asyncio.to_thread(self._layer_store.ensure, frame, _make_frame)
        layers = (
            Layer(path=os.path.join(directory, "over")),
            Layer(path=path),
            Layer(path=os.path.join(directory, "under")),
        )
        return Image(name=name, digest=_digest(frame, path), layers=layers, env=default_env(path))

    def _check(self, name: str) -> str:
        path = name.removeprefix(PREFIX)
        if not path.startswith("/") or "\0" in path:
            raise _invalid(name, "is not an absolute path", "Write it as dir:/srv/bookworm.")
        if not os.path.isdir(path):
            raise NotFound(
                f"no image {name!r}: {path} is not a directory.",
                hint="Unpack a root file system there, for example with debootstrap.",
                kind="image",
                name=name,
            )
        real = os.path.realpath(path)
        if os.path.samefile(real, "/"):
            raise _invalid(name, "is the host itself, with its secrets", "Use the image 'host'.")
        if os.path.commonpath([real, os.path.realpath(self._layer_store.directory)]) == real:
            raise _invalid(
                name, "holds the state directory of Smokebox", "Move the directory elsewhere."
            )
        if not any(os.path.isdir(os.path.join(real, part)) for part in _EXPECTED):
            raise _invalid(
                name,
                f"is not a root file system: it has none of {', '.join(_EXPECTED)}",
                "Pass the directory that has them.",
            )
        return real


def _make_frame(into: str) -> None:
    over, under = os.path.join(into, "over"), os.path.join(into, "under")
    make_directory(over)
    make_directory(under)
    make_directory(os.path.join(over, "etc"))
    for name in _OVERLAID:
        make_file(os.path.join(over, "etc", name), read_etc_file(name))
    make_directories(under, MOUNT_POINTS)


def _digest(frame: str, path: str) -> str:
    """Hash the path and the status of the top directories; the tree is too large to read."""
    digest = hashlib.sha256(f"{frame} {path}".encode(errors="surrogateescape"))
    for directory in (path, os.path.join(path, "etc"), os.path.join(path, "usr")):
        if os.path.isdir(directory):
            found = os.stat(directory)
            digest.update(f"\0{found.st_dev} {found.st_ino} {found.st_mtime_ns}".encode())
    return digest.hexdigest()


def _invalid(name: str, problem: str, hint: str) -> InvalidOption:
    return InvalidOption(f"the image {name!r} {problem}.", hint=hint, option="image", value=name)
