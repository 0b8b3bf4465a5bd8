"""The bodies of objects: a cache with a bound, and reading ahead of a command that scans.

A command reads files one by one, and each costs a round trip. Once it has read a few in the
order of their listing, the ones that follow are fetched beside it.
"""

from __future__ import annotations

import posixpath
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.sandbox.filesystems.objects import Body, Found, Objects
    from smokebox.sandbox.filesystems.sightings import Sightings

# Only what is small is read ahead: a large object takes long by itself, and may not be wanted.
AHEAD_SIZE = 256 * 1024
AHEAD_BYTES = 8 * 1024 * 1024

# After this many files in a row, and then a few at first.
_RUN = 2
_FIRST = 4


class Bodies:
    """Bodies by path, the least recently used given up when `limit` bytes are held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, Body] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def get(self, path: str) -> Body | None:
        """The body last held for `path`, of whatever version."""
        with self._lock:
            body = self._held.get(path)
            if body is not None:
                self._held.move_to_end(path)
            return body

    def holds(self, path: str, version: str) -> bool:
        """Whether this version of the body is held."""
        with self._lock:
            body = self._held.get(path)
            return body is not None and body.version == version

    def put(self, path: str, body: Body) -> None:
        """Hold a body, unless it would push out most of the others."""
        self.drop(path)
        if len(body.data) * 2 > self._limit:
            return
        with self._lock:
            self._held[path] = body
            self.size += len(body.data)
            while self.size > self._limit:
                _, oldest = self._held.popitem(last=False)
                self.size -= len(oldest.data)

    def drop(self, path: str) -> None:
        """Let go of a body."""
        with self._lock:
            body = self._held.pop(path, None)
            if body is not None:
                self.size -= len(body.data)


class _Run:
    """How far reads have followed a listing."""

    last = ""
    length = 0
    look_at = _RUN
    suffix: str | None = ""


class _OwnRun(_Run, threading.local):
    """Those of each thread."""


class ReadAhead:
    """Fetches up to `limit` objects at once, for the thread that is seen to scan."""

    def __init__(self, objects: Objects, sightings: Sightings, bodies: Bodies, limit: int) -> None:
        self._objects = objects
        self._sightings = sightings
        self._bodies = bodies
        self._limit = limit
        self._run: _Run = _OwnRun()
        self._lock = threading.Lock()
        self._coming: dict[str, Future[Body | None]] = {}
        self._bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    def share(self) -> None:
        """Take the reads of all threads for those of one command."""
        self._run = _Run()

    def take(self, path: str) -> Body | None:
        """The body that is on its way for `path`. None where there is none, or it failed."""
        with self._lock:
            coming = self._coming.get(path)
        if coming is None or coming.cancelled():
            return None
        try:
            return coming.result()
        except SmokeboxError:
            # The reader asks for itself, and meets the error where it can be told.
            return None

    def read(self, path: str) -> None:
        """Take note that `path` is being read, and fetch what seems to come next."""
        if not self._limit:
            return
        run = self._run
        run.length = run.length + 1 if self._continues(run, path) else 0
        run.last = path
        if run.length == 0:
            run.look_at = _RUN
        if run.length >= run.look_at:
            window = min(self._limit, _FIRST << min(run.length - _RUN, 8))
            self._fetch(islice(self._next(path, run.suffix), window))
            # Half of it may be read before the next look pays.
            run.look_at = run.length + window // 2

    def _continues(self, run: _Run, path: str) -> bool:
        suffix = posixpath.splitext(path)[1]
        if run.last and next(self._next(run.last, run.suffix), None) == path:
            return True
        if run.last and next(self._next(run.last, None), None) == path:
            run.suffix = None
            return True
        run.suffix = suffix
        return False

    def _next(self, path: str, suffix: str | None) -> Iterator[str]:
        """The files that follow, with one suffix only where all so far had it (`*.md`)."""
        for following, _ in self._sightings.following(path):
            if suffix is None or posixpath.splitext(following)[1] == suffix:
                yield following

    def _fetch(self, paths: Iterator[str]) -> None:
        for path in paths:
            _, found = self._sightings.look(path)
            if found is not None and not found.is_directory and found.entry.size <= AHEAD_SIZE:
                self._start(path, found)

    def _start(self, path: str, found: Found) -> None:
        size = found.entry.size
        with self._lock:
            full = len(self._coming) >= self._limit or self._bytes + size > AHEAD_BYTES
            if full or path in self._coming or self._bodies.holds(path, found.version):
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._limit, thread_name_prefix="smokebox-bucket")
            coming = self._pool.submit(self._objects.get, path[1:])
            self._coming[path] = coming
            self._bytes += size
        coming.add_done_callback(lambda done: self._arrived(path, size, done))

    def _arrived(self, path: str, size: int, done: Future[Body | None]) -> None:
        body = None if done.cancelled() or done.exception() else done.result()
        with self._lock:
            self._bytes -= size
            # What was asked for before a change must not stand for what is there after it.
            if self._coming.get(path) is not done:
                return
            # Held before it is no longer on its way: a reader finds it in one or the other.
            if body is not None:
                self._bodies.put(path, body)
            del self._coming[path]

    def forget(self, path: str | None = None) -> None:
        """Disown what is on its way: for one path, or for all."""
        with self._lock:
            paths = list(self._coming) if path is None else [path]
            disowned = [self._coming.pop(one) for one in paths if one in self._coming]
        # Cancelling calls back at once, and the callback wants the lock.
        for coming in disowned:
            coming.cancel()

    def close(self) -> None:
        """Stop fetching. Safe to repeat."""
        self.forget()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
