"""Makes the root directory of a sandbox that has the host's /usr and nothing else of it."""

from __future__ import annotations

import contextlib
import os
import stat

from smokebox.engine.images import etc_files, shelf
from smokebox.engine.images.public import copy_configuration, drop_dead_links

# Links into /usr on most distributions, directories of their own on the others.
BESIDE_USR = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")

# What the set-up of a sandbox mounts upon or writes to.
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


def make_skeleton(host: str, root: str, *, hidden: tuple[str, ...] = ()) -> None:
    """Fill the empty directory `root`; `host` is the root directory of the host.

    Links into the prefixes `hidden` are left out.
    """
    make_directories(root, _DIRECTORIES)
    for name in BESIDE_USR:
        _make_beside_usr(host, root, name)
    _make_etc(host, root)
    drop_dead_links(host, root, hidden)
    for path, target in _LINKS.items():
        os.symlink(target, os.path.join(root, path))
    # Only root may, and root of a container may not have that id to give.
    with contextlib.suppress(OSError):
        os.chown(os.path.join(root, "home/user"), _USER, _USER)


def make_directories(root: str, modes: dict[str, int]) -> None:
    """Make directories below `root`, parents first."""
    for path in sorted(modes):
        shelf.directory(os.path.join(root, path), modes[path])


def own_directories(host: str) -> list[str]:
    """Those of /bin, /lib and so on that are not links on this host."""
    return [name for name in BESIDE_USR if _is_directory(os.path.join(host, name))]


def _make_beside_usr(host: str, root: str, name: str) -> None:
    path = os.path.join(host, name)
    if os.path.islink(path):
        os.symlink(os.readlink(path), os.path.join(root, name))
    elif os.path.isdir(path):
        shelf.directory(os.path.join(root, name))


def _make_etc(host: str, root: str) -> None:
    etc = os.path.join(root, "etc")
    for name, text in etc_files.MADE_UP.items():
        shelf.file(os.path.join(etc, name), text.encode())
    copy_configuration(host, root)
    with contextlib.suppress(FileNotFoundError):
        shelf.file(os.path.join(etc, "pki/tls/openssl.cnf"), etc_files.OPENSSL.encode())


def _is_directory(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False
