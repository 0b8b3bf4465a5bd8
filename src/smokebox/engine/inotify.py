"""inotify: a typed wrapper, and callbacks on the event loop when a file changes.

A user of the host has few inotify instances (128 by default), so one per event loop serves the
logs and exit files of all sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import struct
import weakref
from typing import TYPE_CHECKING, NamedTuple

from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Callable

MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO = 0x2, 0x4, 0x8, 0x40, 0x80
CREATE, DELETE, DELETE_SELF, MOVE_SELF = 0x100, 0x200, 0x400, 0x800
UNMOUNT, OVERFLOW, IGNORED = 0x2000, 0x4000, 0x8000
ONLYDIR, DONT_FOLLOW, EXCL_UNLINK, ISDIR = 0x01000000, 0x02000000, 0x04000000, 0x40000000

_EVENT = struct.Struct("iIII")
_BUFFER_SIZE = 64 << 10
# Without a pause, a program that writes line by line would wake the loop for every line.
_LOG_PAUSE = 0.005

_libc = ctypes.CDLL(None, use_errno=True)
_add_watch = _libc["inotify_add_watch"]
_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)

_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, InotifyReader]] = (
    weakref.WeakKeyDictionary()
)


class InotifyEvent(NamedTuple):
    """A change to a name in a watched directory, or to the directory itself."""

    watch: int
    mask: int
    cookie: int
    name: str


class Inotify:
    """An inotify instance, to be closed."""

    def __init__(self) -> None:
        self.fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _error("max_user_instances", (errno.EMFILE, errno.ENFILE))

    def add(self, fd: int, mask: int) -> int:
        """Watch the file behind a descriptor. Watching it again returns the same number."""
        # Through the descriptor's link, so that no name is resolved a second time.
        return self._add(b"/proc/self/fd/%d" % fd, mask)

    def add_name(self, folder: int, name: str, mask: int) -> int:
        """Watch a file in an open directory, or a symlink itself."""
        return self._add(b"/proc/self/fd/%d/%b" % (folder, os.fsencode(name)), mask | DONT_FOLLOW)

    def _add(self, path: bytes, mask: int) -> int:
        watch: int = _add_watch(self.fd, path, mask)
        if watch < 0:
            raise _error("max_user_watches", (errno.ENOSPC,))
        return watch

    def remove(self, watch: int) -> None:
        """Remove a watch if it still exists."""
        _libc.inotify_rm_watch(self.fd, watch)

    def read(self) -> list[InotifyEvent]:
        """Return pending events, or the oldest part of them. Never blocks."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _BUFFER_SIZE)
        events: list[InotifyEvent] = []
        offset = 0
        while offset < len(data):
            watch, mask, cookie, size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            name = os.fsdecode(data[offset : offset + size].rstrip(b"\0"))
            events.append(InotifyEvent(watch, mask, cookie, name))
            offset += size
        return events

    def close(self) -> None:
        """Close the instance with all its watches."""
        os.close(self.fd)


def _error(setting: str, limits: tuple[int, ...]) -> Exception:
    number = ctypes.get_errno()
    if number not in limits:
        return OSError(number, os.strerror(number))
    return LimitReached(
        f"the host's limit fs.inotify.{setting} is reached.",
        hint=f"Raise it with `sysctl fs.inotify.{setting}=...`"
        f"{' (or the limit of open files)' * (number != errno.ENOSPC)}, or close other watches.",
        limit=f"fs.inotify.{setting}",
    )


class InotifyWatch:
    """One caller's watch on one file, until closed."""

    def __init__(self, reader: InotifyReader, number: int, callback: Callable[[int], None]) -> None:
        self.number = number
        self.callback = callback
        self._reader = reader

    def close(self) -> None:
        """Stop the callbacks. Safe to repeat."""
        self._reader.remove(self)


class InotifyReader:
    """An inotify instance that exists while there is at least one watch.

    After events it pauses for `pause` seconds, then reads everything that arrived meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: float) -> None:
        self._loop = weakref.ref(loop)
        self._pause = pause
        self._inotify: Inotify | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watches: dict[int, set[InotifyWatch]] = {}

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> InotifyWatch:
        """Call `callback` with a mask whenever an event of `mask` happens to the file of `fd`.

        The mask contains `OVERFLOW` when events were lost.
        """
        if self._inotify is None:
            self._inotify = Inotify()
            self._start_reading()
        watch = InotifyWatch(self, self._inotify.add(fd, mask), callback)
        self._watches.setdefault(watch.number, set()).add(watch)
        return watch

    def remove(self, watch: InotifyWatch) -> None:
        """Remove a watch, and close the instance after the last one."""
        watches = self._watches.get(watch.number, set())
        watches.discard(watch)
        if watches or self._inotify is None:
            return
        if self._watches.pop(watch.number, None) is not None:
            self._inotify.remove(watch.number)
        if not self._watches:
            self._close(self._inotify)

    def _start_reading(self) -> None:
        self._timer = None
        loop = self._loop()
        if loop is not None and self._inotify is not None:
            loop.add_reader(self._inotify.fd, self._on_readable)

    def _on_readable(self) -> None:
        loop = self._loop()
        if self._inotify is None or loop is None:
            return
        masks: dict[int, int] = {}
        for event in self._inotify.read():
            for number in self._watches if event.mask & OVERFLOW else (event.watch,):
                masks[number] = masks.get(number, 0) | event.mask
        if self._pause:
            loop.remove_reader(self._inotify.fd)
            self._timer = loop.call_later(self._pause, self._start_reading)
        for number, mask in masks.items():
            for watch in list(self._watches.get(number, ())):
                watch.callback(mask)

    def _close(self, inotify: Inotify) -> None:
        self._inotify = None
        loop = self._loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif loop is not None and not loop.is_closed():
            loop.remove_reader(inotify.fd)
        inotify.close()


def watch_end(fd: int, callback: Callable[[int], None]) -> InotifyWatch:
    """Watch for writes to a file, and for its close, without delay."""
    return _shared_reader(0.0).watch(fd, MODIFY | CLOSE_WRITE, callback)


def watch_log(fd: int, callback: Callable[[int], None]) -> InotifyWatch:
    """Watch a file that may be written continuously, with a short delay."""
    return _shared_reader(_LOG_PAUSE).watch(fd, MODIFY, callback)


def _shared_reader(pause: float) -> InotifyReader:
    """Return the reader of the running loop with that pause."""
    loop = asyncio.get_running_loop()
    readers = _readers.setdefault(loop, {})
    if pause not in readers:
        readers[pause] = InotifyReader(loop, pause)
    return readers[pause]
