"""`host`: the programs of this host with a made-up root around them, ready at once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import time
from typing import TYPE_CHECKING

from smokebox.engine.images import public, usr_mask
from smokebox.engine.images.image import Image, Layer
from smokebox.engine.images.shelf import Shelf, directory
from smokebox.engine.images.skeleton import (
    BESIDE_USR,
    make_directories,
    make_skeleton,
    own_directories,
)
from smokebox.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

# Another one makes every host's skeleton afresh.
VERSION = 3
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_LOCAL = {name: 0o755 for name in ("bin", "etc", "include", "lib", "sbin", "share", "src")}
# Where the arrival of something in /usr shows.
_WATCHED = (
    "usr",
    "usr/lib",
    "usr/share",
    "usr/share/doc",
    "usr/local",
    "var/lib/dpkg/status",
    "usr/lib/sysimage/rpm/rpmdb.sqlite",
    "var/lib/rpm/rpmdb.sqlite",
)


# A burst of sandboxes looks at the host once.
LOOK_SECONDS = 1.0


class HostImage:
    """The host's /usr below a skeleton: no home, configuration or secret of the host is in it.

    What a sandbox sees of /usr is what everybody on the host can read. `usr_local=False`
    takes /usr/local out as well: programs that somebody installed by hand are there, public
    on this host but perhaps not meant for guests. The default is to have it, because that is
    where many hosts, and the usual container images, have Python and Node.

    Files that become private, or appear in the depths of /usr, after the skeleton was made are
    not noticed until a package is installed or a directory near the top changes.
    """

    def __init__(self, shelf: Shelf, *, host: str = "/", usr_local: bool = True) -> None:
        self._shelf = shelf
        self._host = host
        self._usr_local = usr_local
        self._looked: tuple[float, Image] | None = None

    async def get(self, name: str) -> Image:
        """The image of this host as it is at this moment, give or take a second."""
        if self._looked is not None:
            at, image = self._looked
            if time.monotonic() - at <= LOOK_SECONDS and self._shelf.find(image.digest):
                return image
        at, digest = time.monotonic(), self._digest()
        kept = self._shelf.find(digest)
        if kept is None:
            kept = await asyncio.to_thread(self._shelf.keep, digest, self._make)
        image = Image(
            name=name, digest=digest, layers=self._layers(kept), env=default_env(self._host)
        )
        self._looked = at, image
        return image

    def _make(self, into: str) -> None:
        usr = os.path.join(self._host, "usr")
        if not os.path.isdir(os.path.join(usr, "bin")):
            raise Unsupported(
                f"this host has no {usr}/bin, so it cannot lend its programs.",
                hint="Use an image 'dir:<path>' of a root file system.",
                operation="image",
            )
        hidden = () if self._usr_local else ("/usr/local/",)
        for name in ("root", "usr"):
            directory(os.path.join(into, name))
        make_skeleton(self._host, os.path.join(into, "root"), hidden=hidden)
        usr_mask.make_mask(usr, os.path.join(into, "usr"), local=self._usr_local)
        if not self._usr_local:
            directory(os.path.join(into, "local"))
            make_directories(os.path.join(into, "local"), _LOCAL)

    def _layers(self, kept: str) -> tuple[Layer, ...]:
        beside = own_directories(self._host)
        return (
            Layer(path=os.path.join(kept, "root")),
            *(Layer(path=os.path.join(self._host, name), target=f"/{name}") for name in beside),
            Layer(path=os.path.join(kept, "usr"), target="/usr"),
            Layer(path=os.path.join(self._host, "usr"), target="/usr"),
            *self._local_layers(kept),
        )

    def _local_layers(self, kept: str) -> Iterator[Layer]:
        local = os.path.join(self._host, "usr/local")
        if not self._usr_local:
            yield Layer(path=os.path.join(kept, "local"), target="/usr/local")
        elif _is_file_system(local):
            # A layer ends where its file system does, so the mask and this one come again.
            mask = os.path.join(kept, "usr/local")
            if os.path.isdir(mask):
                yield Layer(path=mask, target="/usr/local")
            yield Layer(path=local, target="/usr/local")

    def _digest(self) -> str:
        digest = hashlib.sha256(f"{VERSION} {self._usr_local} {os.geteuid()}".encode())
        prefix = self._host.rstrip("/")
        for path in self._inputs():
            digest.update(f"\0{path} {_sight(f'{prefix}/{path}')}".encode(errors="replace"))
        return digest.hexdigest()

    def _inputs(self) -> Iterator[str]:
        yield from BESIDE_USR
        yield from public.listed(self._host)
        yield from _WATCHED
        local = os.path.join(self._host, "usr/local")
        if os.path.isdir(local):
            yield from (f"usr/local/{name}" for name in sorted(os.listdir(local)))


def default_env(root: str) -> dict[str, str]:
    """What a command finds in its environment in that root file system, by default."""
    env = {"PATH": PATH, "LANG": "C.UTF-8"}
    if os.path.lexists(os.path.join(root, "usr/bin/apt-get")):
        env["DEBIAN_FRONTEND"] = "noninteractive"
    return env


def _is_file_system(path: str) -> bool:
    return os.path.ismount(path) and not os.path.islink(path)


def _sight(path: str) -> str:
    """What changes when the file at `path`, or the names in a directory, do."""
    try:
        found = os.lstat(path)
        told = f"{found.st_mode} {found.st_size} {found.st_mtime_ns}"
        return f"{told} > {os.stat(path).st_mtime_ns}" if stat.S_ISLNK(found.st_mode) else told
    except OSError as error:
        return str(error.errno)
