"""The terminals of a jail, opened from outside where its kernel is the host's."""

from __future__ import annotations

import fcntl
import os
import stat
import termios
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.jail import linux

if TYPE_CHECKING:
    from smokebox.engine.jail.api import Jail

_PTMX = "dev/pts/ptmx"
_PTMX_DEVICE = os.makedev(5, 2)
_DEVPTS = 0x1CD1
_NO_LINKS = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_IUTF8 = 0o40000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pty:
    """Both ends of a terminal: ours, which does not block, and the program's."""

    master: int
    peer: int


def can_open(jail: Jail) -> bool:
    """Whether the terminals of a jail are those of the host's kernel."""
    return jail.state.tier == "namespaces"


def open_pty(root: int, uid: int | None) -> Pty:
    """A terminal of the jail's own /dev/pts, given to `uid` of the host unless it is ours.

    `root` is the root of the jail. Whatever is in the place of its terminals, no link is
    followed, and nothing is opened that is not the kernel's. Raises OSError.
    """
    master = _open_master(root)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, b"\0\0\0\0")
        # By name it could be another one by now.
        peer = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _prepare(peer, uid)
        except BaseException:
            os.close(peer)
            raise
    except BaseException:
        os.close(master)
        raise
    return Pty(master=master, peer=peer)


def _open_master(root: int) -> int:
    place = linux.openat2(root, _PTMX, os.O_PATH, resolve=_NO_LINKS)
    try:
        found = os.fstat(place)
        kind = stat.S_ISCHR(found.st_mode) and found.st_rdev == _PTMX_DEVICE
        if not kind or linux.filesystem_of(place) != _DEVPTS:
            raise FileNotFoundError(2, "the sandbox has no terminals", f"/{_PTMX}")
        flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{place}", flags)
    finally:
        os.close(place)


def _prepare(peer: int, uid: int | None) -> None:
    if uid is not None:
        os.fchown(peer, uid, -1)
    mode = termios.tcgetattr(peer)
    # Else a backspace takes half of a character.
    mode[0] |= _IUTF8
    termios.tcsetattr(peer, termios.TCSANOW, mode)
