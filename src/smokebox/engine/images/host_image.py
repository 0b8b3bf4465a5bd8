"""The image `host`: the programs of this host in a generated root."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import time
from typing import TYPE_CHECKING

from smokebox.engine.images.etc_files import generated_etc, read_etc_file
from smokebox.engine.images.host_files import (
    configuration_paths,
    copy_configuration,
    drop_dead_links,
    make_mask,
)
from smokebox.engine.images.image import Image, ImageConfig, Layer
from smokebox.engine.images.layer_store import LayerStore, make_directory, make_file
from smokebox.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

# Symlinks into /usr on most distributions, directories on others.
BESIDE_USR = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")

# Directories that the set-up of a sandbox mounts on or writes to.
MOUNT_POINTS = {
    "dev": 0o755,
    "proc": 0o755,
    "run": 0o755,
    "run/smokebox": 0o755,
    "sys": 0o755,
    "tmp": 0o1777,
    "workspace": 0o755,
}
_DIRECTORIES = {
    **MOUNT_POINTS,
    "etc": 0o755,
    "etc/opt": 0o755,
    "etc/pam.d": 0o755,
    "etc/profile.d": 0o755,
    "etc/skel": 0o755,
    "etc/ssl": 0o755,
    "home": 0o755,
    "home/user": 0o755,
    "media": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "root": 0o700,
    "run/lock": 0o1777,
    "srv": 0o755,
    "usr": 0o755,
    "usr/local": 0o755,
    "var": 0o755,
    "var/cache": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/mail": 0o755,
    "var/spool": 0o755,
    "var/tmp": 0o1777,
}
_LINKS = {
    "etc/localtime": "/usr/share/zoneinfo/Etc/UTC",
    "etc/mtab": "../proc/self/mounts",
    "var/lock": "/run/lock",
    "var/run": "/run",
}
_USER = 1000
# Part of the digest: a change makes new skeletons.
VERSION = 4
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_LOCAL = {name: 0o755 for name in ("bin", "etc", "include", "lib", "sbin", "share", "src")}
# Their times change when something is installed in /usr.
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
# Time for which an image is reused without checking the host again.
CACHE_SECONDS = 1.0


def make_skeleton(host: str, root: str, *, hidden: tuple[str, ...] = ()) -> None:
    """Fill the empty directory `root`; `host` is the root directory of the host.

    Symlinks into the prefixes `hidden` are omitted.
    """
    make_directories(root, _DIRECTORIES)
    for name in BESIDE_USR:
        _make_beside_usr(host, root, name)
    _make_etc(host, root)
    drop_dead_links(host, root, hidden)
    for path, target in _LINKS.items():
        os.symlink(target, os.path.join(root, path))
    # Fails for ordinary users, and in a container without that id.
    with contextlib.suppress(OSError):
        os.chown(os.path.join(root, "home/user"), _USER, _USER)


def make_directories(root: str, modes: dict[str, int]) -> None:
    """Create directories below `root`, parents first."""
    for path in sorted(modes):
        make_directory(os.path.join(root, path), modes[path])


def _make_beside_usr(host: str, root: str, name: str) -> None:
    path = os.path.join(host, name)
    if os.path.islink(path):
        os.symlink(os.readlink(path), os.path.join(root, name))
    elif os.path.isdir(path):
        make_directory(os.path.join(root, name))


def _make_etc(host: str, root: str) -> None:
    etc = os.path.join(root, "etc")
    for name, data in generated_etc().items():
        make_file(os.path.join(etc, name), data)
    copy_configuration(host, root)
    with contextlib.suppress(FileNotFoundError):
        make_file(os.path.join(etc, "pki/tls/openssl.cnf"), read_etc_file("ssl/openssl.cnf"))


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


class HostImage:
    """The host's /usr in a generated root, without homes, configuration or secrets of the host.

    A sandbox sees those files of /usr that every user of the host can read. `usr_local=False`
    excludes /usr/local: programs installed there by hand may not be meant for guests. It is
    included by default, because many hosts and common container images have Python and Node
    there.

    Files that become private, or appear deep in /usr, after the skeleton was made are not noticed
    until a package is installed or a directory near the top changes.
    """

    def __init__(self, layer_store: LayerStore, *, host: str = "/", usr_local: bool = True) -> None:
        self._layer_store = layer_store
        self._host = host
        self._usr_local = usr_local
        self._cached: tuple[float, Image] | None = None

    async def get(self, name: str, *, scope: str | None = None) -> Image:
        """Return the image of this host as it was at most a second ago."""
        if self._cached is not None:
            at, image = self._cached
            if time.monotonic() - at <= CACHE_SECONDS and self._layer_store.find(image.digest):
                return image
        at, digest = time.monotonic(), self._digest()
        directory = self._layer_store.find(digest)
        if directory is None:
            directory = await asyncio.to_thread(self._layer_store.ensure, digest, self._make)
        image = Image(
            name=name,
            digest=digest,
            layers=self._layers(directory),
            config=ImageConfig(env=default_env(self._host)),
        )
        self._cached = at, image
        return image

    def _make(self, into: str) -> None:
        usr = os.path.join(self._host, "usr")
        if not os.path.isdir(os.path.join(usr, "bin")):
            raise Unsupported(
                f"this host has no {usr}/bin, so it cannot be used as an image.",
                hint="Use an image 'dir:NAME': the operator names the directory of a root file "
                "system in [images] of server.toml.",
                operation="image",
            )
        hidden = () if self._usr_local else ("/usr/local/",)
        for name in ("root", "usr"):
            make_directory(os.path.join(into, name))
        make_skeleton(self._host, os.path.join(into, "root"), hidden=hidden)
        make_mask(usr, os.path.join(into, "usr"), local=self._usr_local)
        if not self._usr_local:
            make_directory(os.path.join(into, "local"))
            make_directories(os.path.join(into, "local"), _LOCAL)

    def _layers(self, directory: str) -> tuple[Layer, ...]:
        separate = [name for name in BESIDE_USR if _is_directory(os.path.join(self._host, name))]
        return (
            Layer(path=os.path.join(directory, "root")),
            *(Layer(path=os.path.join(self._host, name), target=f"/{name}") for name in separate),
            Layer(path=os.path.join(directory, "usr"), target="/usr"),
            Layer(path=os.path.join(self._host, "usr"), target="/usr"),
            *self._local_layers(directory),
        )

    def _local_layers(self, directory: str) -> Iterator[Layer]:
        local = os.path.join(self._host, "usr/local")
        if not self._usr_local:
            yield Layer(path=os.path.join(directory, "local"), target="/usr/local")
        elif os.path.ismount(local) and not os.path.islink(local):
            # A layer does not include other file systems, so this one and its mask are added.
            mask = os.path.join(directory, "usr/local")
            if os.path.isdir(mask):
                yield Layer(path=mask, target="/usr/local")
            yield Layer(path=local, target="/usr/local")

    def _digest(self) -> str:
        digest = hashlib.sha256(f"{VERSION} {self._usr_local} {os.geteuid()}".encode())
        prefix = self._host.rstrip("/")
        for path in self._inputs():
            digest.update(f"\0{path} {_fingerprint(f'{prefix}/{path}')}".encode(errors="replace"))
        return digest.hexdigest()

    def _inputs(self) -> Iterator[str]:
        yield from BESIDE_USR
        yield from configuration_paths(self._host)
        yield from _WATCHED
        local = os.path.join(self._host, "usr/local")
        if os.path.isdir(local):
            yield from (f"usr/local/{name}" for name in sorted(os.listdir(local)))


def default_env(root: str) -> dict[str, str]:
    """Return the default environment of commands in a root file system."""
    env = {"PATH": PATH, "LANG": "C.UTF-8"}
    if os.path.lexists(os.path.join(root, "usr/bin/apt-get")):
        env["DEBIAN_FRONTEND"] = "noninteractive"
    return env


def _fingerprint(path: str) -> str:
    """Return a text that changes when the file at `path`, or the names in a directory, change."""
    try:
        found = os.lstat(path)
        text = f"{found.st_mode} {found.st_size} {found.st_mtime_ns}"
        return f"{text} > {os.stat(path).st_mtime_ns}" if stat.S_ISLNK(found.st_mode) else text
    except OSError as error:
        return str(error.errno)
