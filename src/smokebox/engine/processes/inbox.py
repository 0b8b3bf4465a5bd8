"""The inbox of an event loop: who is called when a file of the engine changes.

A user of the host has few inotify instances (128 by default), so one serves all sandboxes.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from smokebox.engine.inotify import MODIFY, OVERFLOW, Inotify

if TYPE_CHECKING:
    from collections.abc import Callable

CLOSE_WRITE = 0x8

# A program that writes line by line would otherwise wake the loop at every one.
_LOG_PAUSE = 0.005

_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, Inbox]] = (
    weakref.WeakKeyDictionary()
)


class Watch:
    """One caller's interest in one file, until it is closed."""

    def __init__(self, inbox: Inbox, number: int, call: Callable[[int], None]) -> None:
        self.number = number
        self.call = call
        self._inbox = inbox

    def close(self) -> None:
        """Be called no more. Safe to repeat."""
        self._inbox.remove(self)


class Inbox:
    """An inotify instance that is there while anybody watches anything.

    After news it listens no more for `pause` seconds, and then to all that came meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pause: float) -> None:
        self._loop = weakref.ref(loop)
        self._pause = pause
        self._inotify: Inotify | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watches: dict[int, set[Watch]] = {}

    def watch(self, fd: int, mask: int, call: Callable[[int], None]) -> Watch:
        """Call with a mask whenever something of `mask` happens to the file behind `fd`.

        The mask has `OVERFLOW` when too much happened to know what.
        """
        if self._inotify is None:
            self._inotify = Inotify()
            self._listen()
        watch = Watch(self, self._inotify.add(fd, mask), call)
        self._watches.setdefault(watch.number, set()).add(watch)
        return watch

    def remove(self, watch: Watch) -> None:
        """Forget a watch, and with the last one the instance."""
        of_file = self._watches.get(watch.number, set())
        of_file.discard(watch)
        if of_file or self._inotify is None:
            return
        if self._watches.pop(watch.number, None) is not None:
            self._inotify.remove(watch.number)
        if not self._watches:
            self._close(self._inotify)

    def _listen(self) -> None:
        self._timer = None
        loop = self._loop()
        if loop is not None and self._inotify is not None:
            loop.add_reader(self._inotify.fd, self._hear)

    def _hear(self) -> None:
        loop = self._loop()
        if self._inotify is None or loop is None:
            return
        news: dict[int, int] = {}
        for event in self._inotify.read():
            for number in self._watches if event.mask & OVERFLOW else (event.watch,):
                news[number] = news.get(number, 0) | event.mask
        if self._pause:
            loop.remove_reader(self._inotify.fd)
            self._timer = loop.call_later(self._pause, self._listen)
        for number, mask in news.items():
            for watch in list(self._watches.get(number, ())):
                watch.call(mask)

    def _close(self, inotify: Inotify) -> None:
        self._inotify = None
        loop = self._loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif loop is not None and not loop.is_closed():
            loop.remove_reader(inotify.fd)
        inotify.close()


def watch_end(fd: int, call: Callable[[int], None]) -> Watch:
    """Watch a file that a process writes its end to, and closes."""
    return _inbox(0.0).watch(fd, MODIFY | CLOSE_WRITE, call)


def watch_log(fd: int, call: Callable[[int], None]) -> Watch:
    """Watch a file that may be written to all the time."""
    return _inbox(_LOG_PAUSE).watch(fd, MODIFY, call)


def _inbox(pause: float) -> Inbox:
    loop = asyncio.get_running_loop()
    of_loop = _inboxes.setdefault(loop, {})
    if pause not in of_loop:
        of_loop[pause] = Inbox(loop, pause)
    return of_loop[pause]
