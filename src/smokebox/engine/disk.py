"""How much a sandbox has on disk, and a watch that tells when it is more than allowed.

A quota by watching is soft: what is written between two looks is there already. It needs
no support by the file system and no root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TICK_SECONDS = 1.0
EVERY_SECONDS = 60.0
# The host keeps the smaller of these free for itself, and as great a share of its inodes.
RESERVE_SHARE = 0.02
RESERVE_BYTES = 512 << 20
# Less of a change in free space than this is never worth a look.
LEAST_CHANGE = 4 << 20
PATIENCE_SECONDS = 5.0
MOST_PATIENCE_SECONDS = 60.0

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HELD_LEVELS = 64
_MOST_LINKED = 1 << 17
_ENTRIES_AT_ONCE = 256
_WORK_SECONDS = 0.005
_Scarce = Literal["bytes", "inodes"]
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a tree has on disk; a lower bound unless it is `complete`."""

    bytes: int = 0
    inodes: int = 0
    complete: bool = True


def usage(directory: str) -> int:
    """The bytes of disk that a tree takes: blocks, holes not counted, hard links once."""
    return measure(directory).bytes


def measure(directory: str, stop: Callable[[], bool] = lambda: False) -> Usage:
    """Add up a tree that others change meanwhile, however deep, until `stop` says so.

    No link is followed, no other file system entered, and no path is ever made longer than
    one name. What vanishes is not counted.
    """
    walk = _Walk(stop)
    try:
        top = os.open(directory, _DIRECTORY)
    except OSError as error:
        return Usage(complete=isinstance(error, FileNotFoundError))
    try:
        walk.enter(top)
        while walk.levels and not stop():
            walk.step()
    finally:
        walk.close()
    return Usage(bytes=walk.bytes, inodes=walk.inodes, complete=walk.complete and not walk.levels)


class _Level:
    """A directory on the way down: its descriptor while it is held, and what is left of it."""

    __slots__ = ("fd", "identity", "names")

    def __init__(self, fd: int, identity: tuple[int, int], names: list[str]) -> None:
        self.fd = fd
        self.identity = identity
        self.names = names


class _Walk:
    """Goes through a tree with few descriptors, depth first.

    The upper levels are held open. Below them only the lowest is, and the way back up is
    `..`, which a rename may have bent: then what is left of those levels is given up.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop = stop
        self.levels: list[_Level] = []
        self.bytes = 0
        self.inodes = 0
        self.complete = True
        self.linked: set[int] = set()

    def step(self) -> None:
        """Enter the next directory of the lowest level, or leave that level."""
        level = self.levels[-1]
        if not level.names:
            self.leave()
            return
        try:
            fd = os.open(level.names.pop(), _DIRECTORY, dir_fd=level.fd)
        except PermissionError:
            self.complete = False
            return
        except OSError:
            # Gone, or not a directory any more.
            return
        if len(self.levels) > _HELD_LEVELS:
            os.close(level.fd)
            level.fd = -1
        self.enter(fd)

    def enter(self, fd: int) -> None:
        """Count what is in a directory, and take it for the lowest level."""
        status = os.fstat(fd)
        level = _Level(fd, (status.st_dev, status.st_ino), [])
        self.levels.append(level)
        if len(self.levels) == 1:
            self.count(status)
        if status.st_dev != self.levels[0].identity[0]:
            return
        with contextlib.suppress(FileNotFoundError), os.scandir(fd) as entries:
            for number, entry in enumerate(entries):
                if number % _ENTRIES_AT_ONCE == _ENTRIES_AT_ONCE - 1 and self.stop():
                    self.complete = False
                    return
                self.see(entry, level)

    def see(self, entry: os.DirEntry[str], level: _Level) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        except PermissionError:
            self.complete = False
            return
        self.count(status)
        if stat.S_ISDIR(status.st_mode):
            level.names.append(entry.name)

    def count(self, status: os.stat_result) -> None:
        size = status.st_blocks * 512
        if status.st_nlink > 1 and size and not stat.S_ISDIR(status.st_mode):
            if status.st_ino in self.linked:
                return
            if len(self.linked) < _MOST_LINKED:
                self.linked.add(status.st_ino)
            else:
                # Memory has an end: each name of it counts for its share.
                size //= status.st_nlink
        self.bytes += size
        self.inodes += 1

    def leave(self) -> None:
        """Go up to the level above, if that is still where `..` leads."""
        below = self.levels.pop()
        if self.levels and self.levels[-1].fd == -1:
            self.climb(below.fd)
        os.close(below.fd)

    def climb(self, fd: int) -> None:
        level = self.levels[-1]
        with contextlib.suppress(OSError):
            level.fd = os.open("..", _DIRECTORY, dir_fd=fd)
            status = os.fstat(level.fd)
            if (status.st_dev, status.st_ino) == level.identity:
                return
            os.close(level.fd)
            level.fd = -1
        self.complete = False
        while self.levels[-1].fd == -1:
            self.levels.pop()

    def close(self) -> None:
        for level in self.levels:
            if level.fd != -1:
                os.close(level.fd)


def unlinked(pids: Iterable[int], stop: Callable[[], bool] = lambda: False) -> int:
    """The bytes of files that processes hold open after their last name was removed.

    No directory shows them. Files in memory do not count. A file that is only mapped, or on
    its way through a socket, is not found.
    """
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for pid in pids:
            memory = _memory_devices(pid)
            for number in _descriptors(pid):
                if stop():
                    break
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{number}")
                    nameless = not status.st_nlink and stat.S_ISREG(status.st_mode)
                    if nameless and status.st_dev not in memory:
                        found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def _descriptors(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []


def _memory_devices(pid: int) -> set[int]:
    """The devices of a process's file systems that are in memory, its memfds included."""
    fd = os.memfd_create("device")
    devices = {os.fstat(fd).st_dev}
    os.close(fd)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mountinfo", encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            if right.split(" ", 1)[0] in _IN_MEMORY:
                major, minor = left.split(" ")[2].split(":")
                devices.add(os.makedev(int(major), int(minor)))
    return devices


class _Box:
    """What the watch knows of one sandbox."""

    def __init__(
        self, key: str, directory: str, limit: int | None, pids: Callable[[], Iterable[int]]
    ) -> None:
        self.key = key
        self.directory = directory
        self.limit = limit
        self.pids = pids
        self.usage: Usage | None = None
        self.before: Usage | None = None
        self.told = False
        self.looked = float("-inf")
        self.changed = 0
        self.patience = PATIENCE_SECONDS

    def due(self, changed: int, every: float) -> bool:
        """Whether it could be over its limit since it was measured, or that is long ago."""
        if time.monotonic() - self.looked >= every:
            return True
        if self.limit is None or self.usage is None:
            return False
        room = self.limit - self.usage.bytes
        return changed - self.changed >= max(room // 2, LEAST_CHANGE)

    def measure(self, stop: Callable[[], bool]) -> Usage:
        tree = measure(self.directory, stop)
        hidden = unlinked(self.pids(), stop)
        return Usage(bytes=tree.bytes + hidden, inodes=tree.inodes, complete=tree.complete)

    def note(self, usage: Usage, changed: int) -> None:
        self.before, self.usage = self.usage, usage
        self.looked = time.monotonic()
        self.changed = changed
        # A tree too great to be seen in time gets more of it, lest the rest hide behind.
        more = min(self.patience * 2, MOST_PATIENCE_SECONDS)
        self.patience = PATIENCE_SECONDS if usage.complete else more

    def grown(self, what: _Scarce) -> int:
        if self.usage is None or self.before is None:
            return 0
        if what == "inodes":
            return self.usage.inodes - self.before.inodes
        return self.usage.bytes - self.before.bytes


def room(directory: str | int) -> int:
    """The bytes that may still be written to a file system, besides what the host keeps free."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize - _reserve(space)


def _reserve(space: os.statvfs_result) -> int:
    return int(min(space.f_blocks * space.f_frsize * RESERVE_SHARE, RESERVE_BYTES))


class DiskWatch:
    """Tells which sandbox has more on disk than it may, once each time it comes to that.

    A look is one `statvfs`. A sandbox is measured only when free space changed by so much
    that it could be near its limit, and from time to time; that happens in one thread, which
    rests as long as it works. `over(key, used)` is called for one above its limit. When the
    file system itself is nearly full, `low(key, used)` is called for the one that grew the
    most, whatever its limit.
    """

    def __init__(
        self,
        directory: str,
        *,
        over: Callable[[str, int], None],
        low: Callable[[str, int], None],
        tick: float = TICK_SECONDS,
        every: float = EVERY_SECONDS,
    ) -> None:
        self._directory = directory
        self._over = over
        self._low = low
        self._tick = tick
        self._every = every
        self._boxes: dict[str, _Box] = {}
        self._free: int | None = None
        self._changed = 0
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="smokebox-disk")

    def watch(
        self,
        key: str,
        directory: str,
        limit: int | None,
        *,
        fresh: bool = False,
        pids: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Watch a sandbox whose files and logs are below `directory`, or change its limit.

        `fresh` says that there are none yet, so that all of it is growth. `pids` lists its
        processes, for the files that only they still have.
        """
        box = _Box(key, directory, limit, pids)
        if fresh:
            box.note(Usage(), self._changed)
        elif known := self._boxes.get(key):
            box.before, box.usage = known.before, known.usage
        self._boxes[key] = box

    def forget(self, key: str) -> None:
        """Watch it no longer."""
        self._boxes.pop(key, None)

    def used(self, key: str) -> int | None:
        """The bytes that it had when it was last measured, or None."""
        box = self._boxes.get(key)
        return box.usage.bytes if box and box.usage else None

    async def run(self) -> None:
        """Look, again and again, until cancelled; the watch is over then."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._tick)
        finally:
            self.close()

    def close(self) -> None:
        """Stop measuring. Safe to repeat."""
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def look(self) -> None:
        """Look once: measure what is due and tell what there is to tell."""
        scarce = self._scarce()
        due = [box for box in self._boxes.values() if scarce or box.due(self._changed, self._every)]
        # Those that take long come last, and so hold up nobody.
        for box in sorted(due, key=lambda box: box.patience):
            await self._measure(box)
        if scarce:
            growing = max(due, key=lambda box: box.grown(scarce), default=None)
            if growing and growing.usage and growing.grown(scarce) > 0:
                self._low(growing.key, growing.usage.bytes)

    def _scarce(self) -> _Scarce | None:
        """What the file system is short of, having noted how much free space has changed."""
        try:
            space = os.statvfs(self._directory)
        except OSError:
            return None
        free = space.f_bavail * space.f_frsize
        # A rise counts as a fall does: since the last look one sandbox may have deleted more than
        # another wrote.
        self._changed += abs((free if self._free is None else self._free) - free)
        self._free = free
        if free < _reserve(space):
            return "bytes"
        return "inodes" if space.f_favail < space.f_files * RESERVE_SHARE else None

    async def _measure(self, box: _Box) -> None:
        changed = self._changed
        pace = _Pace(self._stop, box.patience)
        loop = asyncio.get_running_loop()
        usage = await loop.run_in_executor(self._thread, box.measure, pace.stop)
        box.note(usage, changed)
        if self._boxes.get(box.key) is not box:
            return
        over = box.limit is not None and usage.bytes > box.limit
        if over and not box.told:
            self._over(box.key, usage.bytes)
        box.told = over


class _Pace:
    """Makes a thread rest as long as it works, and end when it is told to or has had its time."""

    def __init__(self, told: threading.Event, seconds: float) -> None:
        self._told = told
        self._end = time.monotonic() + seconds
        self._since = time.monotonic()

    def stop(self) -> bool:
        """Whether to stop here; perhaps after a rest."""
        if time.monotonic() - self._since > _WORK_SECONDS:
            self._told.wait(_WORK_SECONDS)
            self._since = time.monotonic()
        return self._told.is_set() or time.monotonic() > self._end
