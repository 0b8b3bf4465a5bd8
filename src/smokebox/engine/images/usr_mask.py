"""Makes the layer above the host's /usr that hides what is not for everybody.

Root inside a sandbox may read all that belongs to root outside, since the layers are mapped
to its ids: the modes of the host do not hold there. So what others could not read on the
host is taken away, by whiteouts. The one thing it adds is the name `python`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from typing import TYPE_CHECKING

from smokebox.engine.images import shelf

if TYPE_CHECKING:
    from collections.abc import Iterator

# Configuration and sources of the host, readable or not: npm and pip keep tokens in the
# former, and a program that runs in a container often lies in /usr/src/app, with its `.env`.
HIDDEN = ("etc/npmrc", "local/etc", "local/pip.conf", "local/src", "pip.conf", "src")
# How far below to look for what is private. Packages, whose files are public however they
# are installed, fill the depths.
DEPTHS = {"": 4, "local": 5}
# Large, and filled by packages only.
_PACKAGED = {"include", "share/doc", "share/icons", "share/locale", "share/man", "share/zoneinfo"}
# Where programs are installed by hand. An ordinary user, who is root inside, owns nothing in
# the host's /usr; a directory of the same name in this layer is his, and takes files.
_INSTALLED_INTO = (
    "local",
    "local/bin",
    "local/include",
    "local/lib",
    "local/lib/node_modules",
    "local/lib/python3*",
    "local/lib/python3*/dist-packages",
    "local/lib/python3*/site-packages",
    "local/sbin",
    "local/share",
    "local/share/man",
)


def make_mask(usr: str, mask: str, *, local: bool) -> None:
    """Fill the empty directory `mask`, to be laid over the directory `usr`.

    Without `local`, /usr/local is only a place for another layer, and is not looked at.
    """
    if not local:
        shelf.directory(os.path.join(mask, "local"))
    for path in sorted({*_known(usr), *_private(usr, local=local)}):
        if local or path.partition("/")[0] != "local":
            _whiteout(usr, mask, path)
    if local and os.geteuid() != 0:
        for pattern in _INSTALLED_INTO:
            for path in glob.glob(pattern, root_dir=usr):
                _mirror(usr, mask, path)
    _name_python(usr, mask, local=local)


def _name_python(usr: str, mask: str, *, local: bool) -> None:
    """Have `python` where the host has only `python3`: scripts and models call it by that name."""
    folders = ("bin", "local/bin") if local else ("bin",)
    if any(os.path.lexists(f"{usr}/{folder}/python") for folder in folders):
        return
    if os.path.exists(f"{usr}/bin/python3") and _mirror(usr, mask, "bin"):
        os.symlink("python3", f"{mask}/bin/python")


def _known(usr: str) -> Iterator[str]:
    return (path for path in HIDDEN if os.path.lexists(os.path.join(usr, path)))


def _private(usr: str, *, local: bool) -> Iterator[str]:
    for top, depth in DEPTHS.items():
        if local or top != "local":
            yield from _private_below(usr, top, depth)


def _private_below(usr: str, directory: str, depth: int) -> Iterator[str]:
    for entry in _entries(os.path.join(usr, directory)):
        path = f"{directory}/{entry.name}" if directory else entry.name
        if entry.is_symlink() or path in HIDDEN:
            continue
        mode = _mode(entry)
        if not is_for_everybody(mode):
            yield path
        elif stat.S_ISDIR(mode) and depth > 1 and path not in DEPTHS and path not in _PACKAGED:
            yield from _private_below(usr, path, depth - 1)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    # It may vanish, as packages are upgraded meanwhile.
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)
    with gone, os.scandir(directory) as found:
        return list(found)
    return []


def _mode(entry: os.DirEntry[str]) -> int:
    """Its mode; 0, which hides it, if it went away or nobody may tell."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return entry.stat(follow_symlinks=False).st_mode
    return 0


def is_for_everybody(mode: int) -> bool:
    """Whether anybody may read what has that mode: a file, or the names in a directory."""
    if stat.S_ISDIR(mode):
        return mode & 0o005 == 0o005
    return stat.S_ISREG(mode) and bool(mode & 0o004)


def _whiteout(usr: str, mask: str, path: str) -> None:
    if _mirror(usr, mask, os.path.dirname(path)):
        os.mknod(os.path.join(mask, path), stat.S_IFCHR, 0)


def _mirror(usr: str, mask: str, path: str) -> bool:
    """Make a directory and its parents as they are in `usr`: the upper one's modes count.

    False if there is no such directory, or if it is hidden itself.
    """
    made = os.path.join(mask, path)
    if os.path.lexists(made):
        return os.path.isdir(made)
    theirs = os.path.join(usr, path)
    if os.path.islink(theirs) or not os.path.isdir(theirs):
        return False
    if not _mirror(usr, mask, os.path.dirname(path)):
        return False
    found = os.stat(theirs)
    shelf.directory(made, stat.S_IMODE(found.st_mode))
    # Only root may, and root of a container may not have those ids.
    with contextlib.suppress(OSError):
        os.chown(made, found.st_uid, found.st_gid)
    return True
