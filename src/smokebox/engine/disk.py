"""Disk usage of sandboxes, and a watch that reports those over their limit.

A quota enforced by watching is soft: data written between two checks is already there. It
needs no support from the file system and no root.
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
# The host keeps the smaller of these free for itself, and the same share of its inodes.
RESERVE_SHARE = 0.02
RESERVE_BYTES = 512 << 20
# A smaller change in free space never triggers a measurement.
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
class TreeUsage:
    """Disk usage of a tree; a lower bound unless `complete`."""

    bytes: int = 0
    inodes: int = 0
    complete: bool = True


def usage(directory: str) -> int:
    """Return the disk usage of a tree in bytes: allocated blocks, hard links counted once."""
    return measure(directory).bytes


def measure(directory: str, stop: Callable[[], bool] = lambda: False) -> TreeUsage:
    """Add up a tree of any depth that may change meanwhile, until `stop` returns true.

    Follows no links and enters no other file system. Opens one name at a time, so that paths
    never grow too long. Entries that vanish are not counted.
    """
    walk = _Walk(stop)
    try:
        top = os.open(directory, _DIRECTORY)
    except OSError as error:
        return TreeUsage(complete=isinstance(error, FileNotFoundError))
    try:
        walk.enter(top)
        while walk.levels and not stop():
            walk.step()
    finally:
        walk.close()
    return TreeUsage(
        bytes=walk.bytes, inodes=walk.inodes, complete=walk.complete and not walk.levels
    )


class _Level:
    """A directory on the way down: its descriptor while held, and the names left to visit."""

    __slots__ = ("fd", "identity", "names")

    def __init__(self, fd: int, identity: tuple[int, int], names: list[str]) -> None:
        self.fd = fd
        self.identity = identity
        self.names = names


class _Walk:
    """Depth-first walk of a tree with a bounded number of descriptors.

    The upper levels are held open. Below them only the lowest is open, and the way back up is
    `..`. If a rename changed where `..` leads, the rest of those levels is skipped.
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
            # Removed, or replaced by something that is not a directory.
            return
        if len(self.levels) > _HELD_LEVELS:
            os.close(level.fd)
            level.fd = -1
        self.enter(fd)

    def enter(self, fd: int) -> None:
        """Count the entries of a directory and make it the lowest level."""
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
                # The set is bounded: beyond that, each name counts for its share.
                size //= status.st_nlink
        self.bytes += size
        self.inodes += 1

    def leave(self) -> None:
        """Go up one level, if `..` still leads there."""
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
    """Return the bytes of deleted files that processes still hold open.

    No directory lists them. Files in memory do not count. Files that are only mapped, or in
    flight through a socket, are not found.
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
    """Return the devices of a process's in-memory file systems, memfds included."""
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
    """State of the watch for one sandbox."""

    def __init__(
        self, key: str, directory: str, limit: int | None, pids: Callable[[], Iterable[int]]
    ) -> None:
        self.key = key
        self.directory = directory
        self.limit = limit
        self.pids = pids
        self.usage: TreeUsage | None = None
        self.before: TreeUsage | None = None
        self.told = False
        self.looked = float("-inf")
        self.changed = 0
        self.patience = PATIENCE_SECONDS

    def due(self, changed: int, every: float) -> bool:
        """Return whether it may have passed its limit, or was last measured too long ago."""
        if time.monotonic() - self.looked >= every:
            return True
        if self.limit is None or self.usage is None:
            return False
        room = self.limit - self.usage.bytes
        return changed - self.changed >= max(room // 2, LEAST_CHANGE)

    def measure(self, stop: Callable[[], bool]) -> TreeUsage:
        tree = measure(self.directory, stop)
        hidden = unlinked(self.pids(), stop)
        return TreeUsage(bytes=tree.bytes + hidden, inodes=tree.inodes, complete=tree.complete)

    def note(self, usage: TreeUsage, changed: int) -> None:
        self.before, self.usage = self.usage, usage
        self.looked = time.monotonic()
        self.changed = changed
        # A tree too large to measure in time gets more of it, or its growth would go unseen.
        more = min(self.patience * 2, MOST_PATIENCE_SECONDS)
        self.patience = PATIENCE_SECONDS if usage.complete else more

    def grown(self, what: _Scarce) -> int:
        if self.usage is None or self.before is None:
            return 0
        if what == "inodes":
            return self.usage.inodes - self.before.inodes
        return self.usage.bytes - self.before.bytes


def room(directory: str | int) -> int:
    """Return the bytes that can still be written, apart from the host's reserve."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize - _reserve(space)


def _reserve(space: os.statvfs_result) -> int:
    return int(min(space.f_blocks * space.f_frsize * RESERVE_SHARE, RESERVE_BYTES))


class DiskWatch:
    """Report sandboxes that pass their disk limit, once for each time they do.

    A check is one `statvfs`. A sandbox is measured only when free space changed enough for it to
    be near its limit, and at long intervals. Measuring runs in one thread, which rests as long
    as it works. `over(key, used)` is called for a sandbox above its limit. When the file system
    itself is nearly full, `low(key, used)` is called for the sandbox that grew the most,
    whatever its limit.
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
        """Watch a sandbox with its files and logs below `directory`, or change its limit.

        `fresh` means that it has no files yet, so that everything counts as growth. `pids` lists
        its processes, to find deleted files that they hold open.
        """
        box = _Box(key, directory, limit, pids)
        if fresh:
            box.note(TreeUsage(), self._changed)
        elif known := self._boxes.get(key):
            box.before, box.usage = known.before, known.usage
        self._boxes[key] = box

    def forget(self, key: str) -> None:
        """Stop watching a sandbox."""
        self._boxes.pop(key, None)

    def used(self, key: str) -> int | None:
        """Return the last measured size in bytes, or None."""
        box = self._boxes.get(key)
        return box.usage.bytes if box and box.usage else None

    async def run(self) -> None:
        """Check at intervals until cancelled, then close."""
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
        """Check once: measure sandboxes that are due, and report."""
        scarce = self._scarce()
        due = [box for box in self._boxes.values() if scarce or box.due(self._changed, self._every)]
        # Slow ones last, so that they delay no others.
        for box in sorted(due, key=lambda box: box.patience):
            await self._measure(box)
        if scarce:
            growing = max(due, key=lambda box: box.grown(scarce), default=None)
            if growing and growing.usage and growing.grown(scarce) > 0:
                self._low(growing.key, growing.usage.bytes)

    def _scarce(self) -> _Scarce | None:
        """Return what the file system is short of, after recording the change of free space."""
        try:
            space = os.statvfs(self._directory)
        except OSError:
            return None
        free = space.f_bavail * space.f_frsize
        # A rise counts like a fall: one sandbox may have deleted more than another wrote.
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
    """Makes a thread rest as long as it works, and end when stopped or out of time."""

    def __init__(self, told: threading.Event, seconds: float) -> None:
        self._told = told
        self._end = time.monotonic() + seconds
        self._since = time.monotonic()

    def stop(self) -> bool:
        """Return whether to stop, possibly after a rest."""
        if time.monotonic() - self._since > _WORK_SECONDS:
            self._told.wait(_WORK_SECONDS)
            self._since = time.monotonic()
        return self._told.is_set() or time.monotonic() > self._end
