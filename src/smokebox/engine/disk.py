"""Disk usage of sandboxes, and a watch that reports those over their limit.

A limit enforced by watching is soft: data written between two checks is already there. It
needs no support from the file system and no root. Where the kernel enforces the limit, the watch
reads the use from it, and reports only what fills the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.engine.disk_ledger import DiskLedger
from smokebox.engine.files.deep_walk import DeepWalk
from smokebox.engine.files.descriptors import LIST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHECK_SECONDS = 1.0
MAX_AGE_SECONDS = 60.0
# The host keeps the smaller of these free for itself, and the same share of its inodes.
RESERVE_SHARE = 0.02
RESERVE_BYTES = 512 << 20
# A smaller change in free space never triggers a measurement.
MIN_CHANGE = 4 << 20
# On a disk that is nearly full, only a sandbox that would fill it within this time is reported,
# and none for less growth than this.
FILLS_SECONDS = 60.0
MIN_GROWTH = {"bytes": 1 << 20, "inodes": 256}
MEASURE_SECONDS = 5.0
MAX_MEASURE_SECONDS = 60.0

_MAX_LINKED = 1 << 16
_WORK_SECONDS = 0.005
_MIN_SECONDS = 0.1
_Resource = Literal["bytes", "inodes"]
_libc = ctypes.CDLL(None, use_errno=True)
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUsage:
    """Disk usage of a tree; a lower bound unless `complete`."""

    bytes: int = 0
    inodes: int = 0
    complete: bool = True


class UsageCounter:
    """Adds up allocated blocks, files and directories; a file with hard links counts once."""

    def __init__(self) -> None:
        self.bytes = self.files = self.directories = 0
        self._linked: set[tuple[int, int]] = set()

    def add(self, status: os.stat_result) -> None:
        size = status.st_blocks * 512
        is_directory = stat.S_ISDIR(status.st_mode)
        if status.st_nlink > 1 and not is_directory:
            if (status.st_dev, status.st_ino) in self._linked:
                return
            if len(self._linked) < _MAX_LINKED:
                self._linked.add((status.st_dev, status.st_ino))
            else:
                # The set is bounded: beyond that, each name counts for its share.
                size //= status.st_nlink
        self.bytes += size
        self.directories += is_directory
        self.files += not is_directory


def measure(directory: str, stop: Callable[[], bool] = lambda: False) -> TreeUsage:
    """Measure a tree of any depth that may change meanwhile, until `stop` returns true."""
    try:
        top = os.open(directory, LIST | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return TreeUsage(complete=isinstance(error, FileNotFoundError))
    counter = UsageCounter()
    counter.add(os.fstat(top))
    walk = DeepWalk(top, lambda entry: counter.add(entry.stat(follow_symlinks=False)), stop)
    walk.run()
    return TreeUsage(
        bytes=counter.bytes,
        inodes=counter.files + counter.directories,
        complete=walk.complete and not walk.stopped,
    )


def measure_deleted(pids: Iterable[int], stop: Callable[[], bool] = lambda: False) -> int:
    """Return the bytes of deleted files that processes still hold open.

    No directory lists them. Files in memory do not count. Files that are only mapped, or in
    flight through a socket, are not found.
    """
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        memory = _memory_devices(pid)
        for number in _descriptors(pid):
            if stop():
                break
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{number}")
                deleted = not status.st_nlink and stat.S_ISREG(status.st_mode)
                if deleted and status.st_dev not in memory:
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


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


def available_bytes(directory: str | int) -> int:
    """Return the bytes that can still be written, apart from the host's reserve."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize - _reserve(space)


def flush_filesystem(fd: int) -> None:
    """Write everything of a file system to its disk."""
    if _libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _reserve(space: os.statvfs_result) -> int:
    return int(min(space.f_blocks * space.f_frsize * RESERVE_SHARE, RESERVE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scarcity:
    """The resource that a file system is short of, and the amount left."""

    resource: _Resource
    free: int
    directory: str


class _FileSystem:
    """State of the watch for one file system."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._free: int | None = None
        self.changed = 0

    def check(self) -> _Scarcity | None:
        """Return what is scarce, after recording the change of free space."""
        try:
            space = os.statvfs(self._directory)
        except OSError:
            return None
        free = space.f_bavail * space.f_frsize
        # A rise counts like a fall: one sandbox may have deleted more than another wrote.
        self.changed += abs((free if self._free is None else self._free) - free)
        self._free = free
        if free < _reserve(space):
            return _Scarcity(resource="bytes", free=free, directory=self._directory)
        if space.f_favail < space.f_files * RESERVE_SHARE:
            return _Scarcity(resource="inodes", free=space.f_favail, directory=self._directory)
        return None


class _WatchedSandbox:
    """State of the watch for one sandbox."""

    def __init__(
        self,
        key: str,
        directory: str,
        limit: int | None,
        pids: Callable[[], Iterable[int]],
        read: Callable[[], TreeUsage | None] | None,
    ) -> None:
        self.key = key
        self.directory = directory
        self.limit = limit
        self.pids = pids
        self.read = read
        self.ledger = DiskLedger()
        self.usage: TreeUsage | None = None
        self.previous: TreeUsage | None = None
        self.reported = False
        self.measured_at = float("-inf")
        # The seconds between the last two measurements, and the time of the last.
        self.seconds, self.usage_at = 0.0, self.measured_at
        self.changed = 0
        self.time_limit = MEASURE_SECONDS

    def due(self, changed: int, max_age: float) -> bool:
        """Return whether it may have passed its limit, or was last measured too long ago."""
        if time.monotonic() - self.measured_at >= max_age:
            return True
        if self.limit is None or self.usage is None:
            return False
        remaining = self.limit - self.usage.bytes
        return changed - self.changed >= max(remaining // 2, MIN_CHANGE)

    def measure(self, stop: Callable[[], bool]) -> TreeUsage:
        if self.read is not None and (usage := self.read()) is not None:
            return usage
        tree = measure(self.directory, stop)
        deleted = 0
        # The processes may end at any time.
        with contextlib.suppress(OSError):
            deleted = measure_deleted(self.pids(), stop)
        return TreeUsage(bytes=tree.bytes + deleted, inodes=tree.inodes, complete=tree.complete)

    def update(self, usage: TreeUsage, changed: int, mark: int = 0) -> None:
        self.ledger.end_measurement(usage.bytes, mark)
        self.previous, self.usage = self.usage, usage
        self.measured_at = time.monotonic()
        self.seconds, self.usage_at = self.measured_at - self.usage_at, self.measured_at
        self.changed = changed
        # A tree too large to measure in time gets more of it, or its growth would go unseen.
        longer = min(self.time_limit * 2, MAX_MEASURE_SECONDS)
        self.time_limit = MEASURE_SECONDS if usage.complete else longer

    def growth(self, resource: _Resource) -> int:
        if self.usage is None or self.previous is None:
            return 0
        if resource == "inodes":
            return self.usage.inodes - self.previous.inodes
        return self.usage.bytes - self.previous.bytes

    def rate(self, resource: _Resource) -> float:
        """Return its growth per second: the measurements of two sandboxes differ in age."""
        return self.growth(resource) / max(self.seconds, _MIN_SECONDS)

    def fills(self, scarce: _Scarcity) -> bool:
        """Return whether it would soon fill a file system, and not only write a little on it."""
        growth = self.growth(scarce.resource)
        return growth >= MIN_GROWTH[scarce.resource] and (
            self.rate(scarce.resource) * FILLS_SECONDS > scarce.free
        )


class DiskWatch:
    """Report sandboxes that pass their disk limit, once for each time they do.

    A check is one `statvfs`. A sandbox is measured only when free space changed enough for it to
    be near its limit, and when its last measurement is `max_age` seconds old. Measuring runs in
    one thread, which rests as long as it works. `over(key, used)` is called for a sandbox above
    its limit. When the file system itself is nearly full, `low(key, used)` is called for the
    sandbox that grew the fastest, with or without a limit, if it would soon fill it.

    Args:
        directory: A directory on the file system that all sandboxes share.
        pool: Directory of those sandboxes that share another file system as well.
        over: Called for a sandbox above its limit.
        low: Called for the sandbox that fills a file system.
        interval: Seconds between two checks.
        max_age: Seconds after which a sandbox is measured again.
    """

    def __init__(
        self,
        directory: str,
        *,
        pool: str | None = None,
        over: Callable[[str, int], None],
        low: Callable[[str, int], None],
        interval: float = CHECK_SECONDS,
        max_age: float = MAX_AGE_SECONDS,
    ) -> None:
        self._file_systems = [_FileSystem(one) for one in (pool, directory) if one is not None]
        self._pool = pool
        self._over = over
        self._low = low
        self._interval = interval
        self._max_age = max_age
        self._sandboxes: dict[str, _WatchedSandbox] = {}
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="smokebox-disk")

    def watch(
        self,
        key: str,
        directory: str,
        limit: int | None,
        *,
        fresh: bool = False,
        pids: Callable[[], Iterable[int]] = tuple,
        read: Callable[[], TreeUsage | None] | None = None,
    ) -> None:
        """Watch a sandbox with its files below `directory`, or change its limit.

        `fresh` means that it has no files yet, so that everything counts as growth. `pids` lists
        its processes, to find deleted files that they hold open. `read` returns what the kernel
        counts, if it enforces the limit.
        """
        sandbox = _WatchedSandbox(key, directory, limit, pids, read)
        if fresh:
            sandbox.update(TreeUsage(), self._changed)
        elif known := self._sandboxes.get(key):
            sandbox.previous, sandbox.usage = known.previous, known.usage
            sandbox.seconds, sandbox.usage_at = known.seconds, known.usage_at
            sandbox.ledger = known.ledger
        sandbox.ledger.limit = limit
        self._sandboxes[key] = sandbox

    def forget(self, key: str) -> None:
        """Stop watching a sandbox."""
        self._sandboxes.pop(key, None)

    def used(self, key: str) -> int | None:
        """Return the last measured size in bytes, or None."""
        sandbox = self._sandboxes.get(key)
        return sandbox.usage.bytes if sandbox and sandbox.usage else None

    def ledger(self, key: str) -> DiskLedger:
        """Return the bookkeeping of a sandbox; one without a limit if it is not watched."""
        sandbox = self._sandboxes.get(key)
        return sandbox.ledger if sandbox else DiskLedger()

    async def measure(self, key: str, *, only_if_due: bool = False) -> None:
        """Measure a sandbox at once, if it is watched, and with `only_if_due` if it is due."""
        sandbox = self._sandboxes.get(key)
        if sandbox is None:
            return
        self._find_scarcity()
        exact = sandbox.read is not None
        if exact or not only_if_due or sandbox.due(self._changed, self._max_age):
            # Not in the thread of the checks: others may be in line there.
            await self._measure(sandbox, executor=None)

    async def run(self) -> None:
        """Check at intervals until cancelled, then close."""
        try:
            while True:
                await self.check()
                await asyncio.sleep(self._interval)
        finally:
            self.close()

    def close(self) -> None:
        """Stop measuring. Safe to repeat."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self) -> None:
        """Check once: measure sandboxes that are due, and report."""
        scarce = self._find_scarcity()
        due = [
            sandbox
            for sandbox in self._sandboxes.values()
            if scarce or sandbox.due(self._changed, self._max_age)
        ]
        # Slow ones last, so that they delay no others.
        for sandbox in sorted(due, key=lambda sandbox: sandbox.time_limit):
            await self._measure(sandbox, self._thread)
        if scarce:
            filling = [one for one in due if one.fills(scarce) and self._shares(one, scarce)]
            fastest = max(filling, key=lambda one: one.rate(scarce.resource), default=None)
            if fastest and fastest.usage:
                self._low(fastest.key, fastest.usage.bytes)

    @property
    def _changed(self) -> int:
        return sum(one.changed for one in self._file_systems)

    def _find_scarcity(self) -> _Scarcity | None:
        found = [scarce for one in self._file_systems if (scarce := one.check()) is not None]
        return found[0] if found else None

    def _shares(self, sandbox: _WatchedSandbox, scarce: _Scarcity) -> bool:
        """Return whether the files of a sandbox are on the scarce file system."""
        # Those in the pool are on the other one as well, in the file of the pool.
        inside = f"{self._pool}/"
        return scarce.directory != self._pool or sandbox.directory.startswith(inside)

    async def _measure(self, sandbox: _WatchedSandbox, executor: ThreadPoolExecutor | None) -> None:
        changed, mark = self._changed, sandbox.ledger.begin_measurement()
        pace = _Pace(self._closed, sandbox.time_limit)
        loop = asyncio.get_running_loop()
        usage = await loop.run_in_executor(executor, sandbox.measure, pace.stop)
        sandbox.update(usage, changed, mark)
        if self._sandboxes.get(sandbox.key) is not sandbox:
            return
        enforced = sandbox.read is not None
        over = not enforced and sandbox.limit is not None and usage.bytes > sandbox.limit
        if over and not sandbox.reported:
            self._over(sandbox.key, usage.bytes)
        sandbox.reported = over


class _Pace:
    """Makes a thread rest as long as it works, and end when `closed` is set or time is up."""

    def __init__(self, closed: threading.Event, seconds: float) -> None:
        self._closed = closed
        self._end = time.monotonic() + seconds
        self._since = time.monotonic()

    def stop(self) -> bool:
        """Return whether to stop, possibly after a rest."""
        if time.monotonic() - self._since > _WORK_SECONDS:
            self._closed.wait(_WORK_SECONDS)
            self._since = time.monotonic()
        return self._closed.is_set() or time.monotonic() > self._end
