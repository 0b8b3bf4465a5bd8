"""Marks of overlay file systems in layers, and our own record of owners that cannot be stored.

A whiteout, a character device 0:0, hides a name of the layers below. An opaque directory hides
all that is in directories of its path below. Both can be made without privileges.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_bits
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import SEARCH, closing, open_child
from smokebox.engine.files.trees import lstat

if TYPE_CHECKING:
    from collections.abc import Sequence

OPAQUE = "user.overlay.opaque"
"""Extended attribute of opaque directories."""
OVERLAY = ("user.overlay.", "trusted.overlay.")
"""Prefixes of extended attributes that the kernel gives a meaning in layers."""
INTENDED = "user.smokebox."
"""Prefix of extended attributes that hold what an ordinary user cannot set: owner and mode."""

_NONE = (errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM)


def make_whiteout(folder: int, name: str) -> None:
    """Make a whiteout. Raises FileExistsError for a name that is taken."""
    os.mknod(name, stat_bits.S_IFCHR, 0, dir_fd=folder)


def is_whiteout(found: os.stat_result) -> bool:
    """Return whether this is a whiteout."""
    return stat_bits.S_ISCHR(found.st_mode) and found.st_rdev == 0


def set_opaque(directory: int) -> None:
    """Make an open directory opaque."""
    os.setxattr(_path(directory), OPAQUE, b"y")


def is_opaque(directory: int) -> bool:
    """Return whether an open directory is opaque."""
    return get_xattr(directory, OPAQUE) == b"y"


def get_xattr(fd: int, name: str) -> bytes | None:
    """Return an extended attribute of an open file, also of one that is open by O_PATH only."""
    try:
        return os.getxattr(_path(fd), name)
    except OSError as error:
        if error.errno in _NONE:
            return None
        raise


def xattrs_of(fd: int) -> dict[str, bytes]:
    """Return the extended attributes of an open file."""
    try:
        names = os.listxattr(_path(fd))
    except OSError as error:
        if error.errno in _NONE:
            return {}
        raise
    found = {name: get_xattr(fd, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _path(fd: int) -> str:
    # Calls by descriptor refuse one that was opened with O_PATH.
    return f"/proc/self/fd/{fd}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerEntry:
    """An entry that layers show together: its directory in one of them, and its status there."""

    folder: str
    name: str
    stat: os.stat_result


class LowerView:
    """The directories of layers as a sandbox sees them, the uppermost first."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = tuple(layers)

    def find(self, path: str) -> LowerEntry | None:
        """Return the entry at a relative path. Symlinks on the way are not followed."""
        *folders, name = path.split("/")
        shown = list(self._layers)
        for folder in folders:
            shown = self._enter(shown, folder)
        for directory in shown:
            with contextlib.suppress(NotADirectoryError), closing(_open(directory)) as fd:
                found = lstat(fd, name)
            if found is not None:
                return (
                    None
                    if is_whiteout(found)
                    else LowerEntry(folder=directory, name=name, stat=found)
                )
        return None

    def names(self, path: str = "") -> set[str]:
        """Return the names in a directory."""
        shown = list(self._layers)
        for folder in path.split("/") if path else ():
            shown = self._enter(shown, folder)
        names: set[str] = set()
        hidden: set[str] = set()
        for directory in shown:
            with os.scandir(directory) as entries:
                found = {one.name: one.stat(follow_symlinks=False) for one in entries}
            names |= {name for name, at in found.items() if not is_whiteout(at)} - hidden
            hidden |= set(found)
        return names

    def _enter(self, shown: list[str], name: str) -> list[str]:
        """Return the directories of that name that are merged, the uppermost first."""
        below: list[str] = []
        for directory in shown:
            with closing(_open(directory)) as fd:
                found = lstat(fd, name)
                if found is None:
                    continue
                if not stat_bits.S_ISDIR(found.st_mode):
                    break
                below.append(os.path.join(directory, name))
                with closing(open_child(fd, name, SEARCH)) as child:
                    if is_opaque(child):
                        break
        return below


def _open(directory: str) -> int:
    return os.open(directory, SEARCH | os.O_NOFOLLOW | os.O_CLOEXEC)
