"""inotify, as one typed class: which descriptors are watched, and what happened to them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from typing import NamedTuple

from smokebox.errors import LimitReached

MODIFY, ATTRIB, MOVED_FROM, MOVED_TO = 0x2, 0x4, 0x40, 0x80
CREATE, DELETE, DELETE_SELF, MOVE_SELF = 0x100, 0x200, 0x400, 0x800
UNMOUNT, OVERFLOW, IGNORED = 0x2000, 0x4000, 0x8000
ONLYDIR, EXCL_UNLINK, ISDIR = 0x01000000, 0x04000000, 0x40000000

_EVENT = struct.Struct("iIII")
_ROOM = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_add_watch = _libc["inotify_add_watch"]
_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)


class Event(NamedTuple):
    """What happened to a name in a watched directory, or to the directory itself."""

    watch: int
    mask: int
    cookie: int
    name: str


class Inotify:
    """An inotify instance. Close it."""

    def __init__(self) -> None:
        self.fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _error("max_user_instances", (errno.EMFILE, errno.ENFILE))

    def add(self, fd: int, mask: int) -> int:
        """Watch what a descriptor is of; the same number again for what is watched already."""
        # By the descriptor's own link, so that no name is looked up a second time.
        watch: int = _add_watch(self.fd, b"/proc/self/fd/%d" % fd, mask)
        if watch < 0:
            raise _error("max_user_watches", (errno.ENOSPC,))
        return watch

    def remove(self, watch: int) -> None:
        """Watch it no longer, if it still is."""
        _libc.inotify_rm_watch(self.fd, watch)

    def read(self) -> list[Event]:
        """What happened and was not yet read, or the oldest part of it; never waits."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _ROOM)
        events: list[Event] = []
        offset = 0
        while offset < len(data):
            watch, mask, cookie, size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            name = os.fsdecode(data[offset : offset + size].rstrip(b"\0"))
            events.append(Event(watch, mask, cookie, name))
            offset += size
        return events

    def close(self) -> None:
        """Let go of it and of all its watches."""
        os.close(self.fd)


def _error(setting: str, limits: tuple[int, ...]) -> Exception:
    number = ctypes.get_errno()
    if number not in limits:
        return OSError(number, os.strerror(number))
    return LimitReached(
        f"this host gives no more of fs.inotify.{setting}.",
        hint=f"Raise it with `sysctl fs.inotify.{setting}=...`"
        f"{' (or the limit of open files)' * (number != errno.ENOSPC)}, or end other watches.",
        limit=f"fs.inotify.{setting}",
    )
