"""Caches of a bucket's listings and bodies, and read-ahead for commands that scan.

A listing is valid for the names in it while a command works through them, and for names that are
missing from it only while it is fresh. `clear` drops everything before the next command.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from smokebox.errors import SmokeboxError
from smokebox.sandbox.filesystems.objects import DIRECTORY, ObjectEntry, add_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.sandbox.filesystems.objects import ObjectBody, ObjectEntry, Objects, ObjectWalk


T = TypeVar("T")

# Seconds. A listing is valid for as long as a command may take to work through it. A missing name,
# or a second listing of the same directory, is more likely to look for a change.
LISTING_SECONDS = 30.0
FRESH_SECONDS = 1.0


class Listing:
    """Cached listing of one directory.

    `delivered` is set once a caller has received all of it. `descents` counts listed
    subdirectories, `walks` the long listings below it, which have reached the key `reached`, or
    the end if `walked_all` is set.
    """

    __slots__ = (
        "_fetched_at",
        "_order",
        "_positions",
        "_valid_for",
        "delivered",
        "descents",
        "found",
        "reached",
        "walked_all",
        "walks",
    )

    def __init__(
        self, found: Mapping[str, ObjectEntry], fetched_at: float, valid_for: float, delivered: bool
    ) -> None:
        self.found = found
        self.delivered = delivered
        self._fetched_at = fetched_at
        self._valid_for = valid_for
        self.descents = 0
        self.walks = 0
        self.reached = ""
        self.walked_all = False
        self._order: list[str] = []
        self._positions: dict[str, int] = {}

    @property
    def is_valid(self) -> bool:
        """True if a name in the listing can be trusted."""
        return time.monotonic() - self._fetched_at < self._valid_for

    @property
    def is_current(self) -> bool:
        """True if the absence of a name can be trusted."""
        valid_for = FRESH_SECONDS if self.delivered else self._valid_for
        return time.monotonic() - self._fetched_at < valid_for

    def after(self, name: str) -> Iterator[str]:
        """Return the names after `name` in sorted order; all of them if it is not listed."""
        if not self._order:
            self._order = sorted(self.found)
            self._positions = {name: place for place, name in enumerate(self._order)}
        for place in range(self._positions.get(name, -1) + 1, len(self._order)):
            yield self._order[place]


class ListingCache:
    """Cached listings and entries by path, shared by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Until `refresh` announces commands, entries expire quickly.
        self.valid_for = FRESH_SECONDS
        # Counts changes: a response requested before a change must not be cached after it.
        self.changes = 0
        self._listings: dict[str, Listing] = {}
        self._entries: dict[str, tuple[ObjectEntry | None, float]] = {}

    def lookup(self, path: str) -> tuple[bool, ObjectEntry | None]:
        """Return whether `path` is cached, and its entry: None if nothing is there."""
        with self._lock:
            cached = self._entries.get(path)
            listing = self._listings.get(posixpath.dirname(path))
            own = self._listings.get(path)
        if cached is not None and time.monotonic() - cached[1] < FRESH_SECONDS:
            return True, cached[0]
        if listing is not None:
            found = listing.found.get(posixpath.basename(path))
            if listing.is_valid if found is not None else listing.is_current:
                return True, found
        if own is not None and own.is_current:
            return True, DIRECTORY
        return False, None

    def listing(self, path: str) -> Listing | None:
        """Return the cached listing of a directory for a caller that needs all of it.

        A second call in the same command looks for changes, so it gets a fresh listing only.
        """
        listing = self.peek(path)
        if listing is None or not listing.is_current:
            return None
        listing.delivered = True
        return listing

    def peek(self, path: str) -> Listing | None:
        """Return the cached listing of a directory if it is still valid."""
        with self._lock:
            listing = self._listings.get(path)
        return listing if listing is not None and listing.is_valid else None

    def add_entry(self, path: str, found: ObjectEntry | None, *, since: int) -> None:
        """Cache the entry of one path, unless something changed since the change number `since`."""
        with self._lock:
            if self.changes == since:
                self._entries[path] = (found, time.monotonic())

    def add(
        self,
        listings: Mapping[str, Mapping[str, ObjectEntry]],
        *,
        since: int,
        delivered: bool = True,
    ) -> None:
        """Cache listings, unless something changed since the change number `since`.

        `delivered` is False for listings that were read ahead.
        """
        fetched_at = time.monotonic()
        with self._lock:
            if self.changes == since:
                for path, found in listings.items():
                    self._listings[path] = Listing(found, fetched_at, self.valid_for, delivered)

    def drop(self, path: str, *, tree: bool = False) -> None:
        """Drop `path` and the listing it is in; with `tree` also everything below it."""
        with self._lock:
            self.changes += 1
            self._entries.pop(path, None)
            self._listings.pop(path, None)
            self._listings.pop(posixpath.dirname(path), None)
            if tree:
                self._entries = _outside(path + "/", self._entries)
                self._listings = _outside(path + "/", self._listings)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self.changes += 1
            self._listings.clear()
            self._entries.clear()

    def following(self, path: str) -> Iterator[tuple[str, ObjectEntry]]:
        """Return the files that a walk would read after `path`, as far as they are cached."""
        while path != "/":
            above, name = posixpath.split(path)
            listing = self.peek(above)
            if listing is None:
                return
            yield from self._files(above, listing, name)
            path = above

    def _files(
        self, directory: str, listing: Listing, name: str = ""
    ) -> Iterator[tuple[str, ObjectEntry]]:
        for following in listing.after(name):
            path = posixpath.join(directory, following)
            found = listing.found[following]
            if not found.is_directory:
                yield path, found
                continue
            inner = self.peek(path)
            if inner is None:
                return
            yield from self._files(path, inner)


def _outside(prefix: str, known: dict[str, T]) -> dict[str, T]:
    return {path: seen for path, seen in known.items() if not path.startswith(prefix)}


def directories(
    walked: ObjectWalk, top: str, marker: str, after: str = ""
) -> dict[str, dict[str, ObjectEntry]]:
    """Return the listings of `top` and of each directory below it that was listed completely.

    A listing of keys cannot tell an empty file from the marker of an empty directory, so a
    directory that holds one is left out, as are those that the page boundaries may have cut.
    """
    listings: dict[str, dict[str, ObjectEntry]] = {top: {}}
    empty: list[str] = []
    for key, found in walked.found:
        path = "/" + key
        if path == top:
            continue
        above, _, name = path.rpartition("/")
        inside = listings.get(above or "/")
        if inside is None:
            inside = _add_above(listings, above, top)
        if name == marker:
            continue
        add_object(inside, name, found)
        if not found.entry.size:
            empty.append(path)
    for path in empty:
        above, name = posixpath.split(path)
        if above in listings and not listings[above][name].is_directory:
            del listings[above]
    cuts = [after] if walked.ended or not walked.found else [after, walked.found[-1][0]]
    for key in filter(None, cuts):
        for above in _upward(posixpath.dirname("/" + key), top):
            listings.pop(above, None)
    return listings


def resume_after(walked: ObjectWalk, top: str, after: str) -> str:
    """Return the key to continue after, so that a directory cut by the page end is listed whole.

    A directory longer than a whole page is skipped.
    """
    if not walked.found:
        return after
    last = walked.found[-1][0]
    start = len(top.strip("/")) + 1 if top != "/" else 0
    cut = last[:start] + last[start:].partition("/")[0]
    return cut if cut > after else last


def _add_above(
    listings: dict[str, dict[str, ObjectEntry]], directory: str, top: str
) -> dict[str, ObjectEntry]:
    """Add a directory and its missing parents, and return its entries so far."""
    for path in _upward(directory, top):
        if path in listings:
            break
        listings[path] = {}
    for path in _upward(directory, top):
        if path == top:
            break
        above, name = posixpath.split(path)
        _add_directory(listings[above], name)
    return listings[directory]


def _add_directory(found: dict[str, ObjectEntry], name: str) -> None:
    # A file hides a directory of the same name, unless it is empty and marks it.
    if name not in found or not found[name].entry.size:
        found[name] = DIRECTORY


def _upward(path: str, top: str) -> Iterator[str]:
    """Yield `path` and its parents, up to and including `top`."""
    yield path
    while path not in (top, "/"):
        path = path.rpartition("/")[0] or "/"
        yield path


# Only small objects are read ahead: a large one takes long, and may not be needed.
AHEAD_SIZE = 256 * 1024
AHEAD_BYTES = 8 * 1024 * 1024

# Files read in order before read-ahead starts, and the size of the first batch.
_MIN_RUN = 2
_FIRST_BATCH = 4


class BodyCache:
    """LRU cache of bodies by path, bounded by `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bodies: OrderedDict[str, ObjectBody] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def get(self, path: str) -> ObjectBody | None:
        """Return the cached body of `path`, of any version."""
        with self._lock:
            body = self._bodies.get(path)
            if body is not None:
                self._bodies.move_to_end(path)
            return body

    def has(self, path: str, version: str) -> bool:
        """Return whether this version of the body is cached."""
        with self._lock:
            body = self._bodies.get(path)
            return body is not None and body.version == version

    def put(self, path: str, body: ObjectBody) -> None:
        """Cache a body, unless it would evict most of the others."""
        self.drop(path)
        if len(body.data) * 2 > self._limit:
            return
        with self._lock:
            self._bodies[path] = body
            self.size += len(body.data)
            while self.size > self._limit:
                _, oldest = self._bodies.popitem(last=False)
                self.size -= len(oldest.data)

    def drop(self, path: str) -> None:
        """Drop a body."""
        with self._lock:
            body = self._bodies.pop(path, None)
            if body is not None:
                self.size -= len(body.data)


class _Scan:
    """Progress of a scan that reads files in listing order."""

    last = ""
    length = 0
    next_batch_at = _MIN_RUN
    suffix: str | None = ""


class _ThreadScan(_Scan, threading.local):
    """One scan per thread."""


class ReadAhead:
    """Fetches up to `limit` objects in parallel ahead of a thread that scans."""

    def __init__(
        self, objects: Objects, listings: ListingCache, bodies: BodyCache, limit: int
    ) -> None:
        self._objects = objects
        self._listings = listings
        self._bodies = bodies
        self._limit = limit
        self._scan: _Scan = _ThreadScan()
        self._lock = threading.Lock()
        self._pending: dict[str, Future[ObjectBody | None]] = {}
        self._bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    def share_scan(self) -> None:
        """Treat the reads of all threads as one scan."""
        self._scan = _Scan()

    def take(self, path: str) -> ObjectBody | None:
        """Return the body being fetched for `path`; None if there is none, or it failed."""
        with self._lock:
            future = self._pending.get(path)
        if future is None or future.cancelled():
            return None
        try:
            return future.result()
        except SmokeboxError:
            # The reader fetches it itself and reports the error.
            return None

    def read(self, path: str) -> None:
        """Record a read of `path`, and fetch the files that are likely to follow."""
        if not self._limit:
            return
        scan = self._scan
        scan.length = scan.length + 1 if self._continues(scan, path) else 0
        scan.last = path
        if scan.length == 0:
            scan.next_batch_at = _MIN_RUN
        if scan.length >= scan.next_batch_at:
            window = min(self._limit, _FIRST_BATCH << min(scan.length - _MIN_RUN, 8))
            self._fetch(islice(self._next(path, scan.suffix), window))
            # Wait until half of the batch was read before fetching more.
            scan.next_batch_at = scan.length + window // 2

    def _continues(self, scan: _Scan, path: str) -> bool:
        suffix = posixpath.splitext(path)[1]
        if scan.last and next(self._next(scan.last, scan.suffix), None) == path:
            return True
        if scan.last and next(self._next(scan.last, None), None) == path:
            scan.suffix = None
            return True
        scan.suffix = suffix
        return False

    def _next(self, path: str, suffix: str | None) -> Iterator[str]:
        """Return the files that follow, of one suffix if all reads so far had the same (`*.md`)."""
        for following, _ in self._listings.following(path):
            if suffix is None or posixpath.splitext(following)[1] == suffix:
                yield following

    def _fetch(self, paths: Iterator[str]) -> None:
        for path in paths:
            _, found = self._listings.lookup(path)
            if found is not None and not found.is_directory and found.entry.size <= AHEAD_SIZE:
                self._start(path, found)

    def _start(self, path: str, found: ObjectEntry) -> None:
        size = found.entry.size
        with self._lock:
            full = len(self._pending) >= self._limit or self._bytes + size > AHEAD_BYTES
            if full or path in self._pending or self._bodies.has(path, found.version):
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._limit, thread_name_prefix="smokebox-bucket")
            future = self._pool.submit(self._objects.get, path[1:])
            self._pending[path] = future
            self._bytes += size
        future.add_done_callback(lambda done: self._store_result(path, size, done))

    def _store_result(self, path: str, size: int, done: Future[ObjectBody | None]) -> None:
        body = None if done.cancelled() or done.exception() else done.result()
        with self._lock:
            self._bytes -= size
            # A body requested before a change must not be cached after it.
            if self._pending.get(path) is not done:
                return
            # Cache it before it leaves the pending set: a reader finds it in one or the other.
            if body is not None:
                self._bodies.put(path, body)
            del self._pending[path]

    def forget(self, path: str | None = None) -> None:
        """Drop pending fetches: of one path, or all."""
        with self._lock:
            paths = list(self._pending) if path is None else [path]
            dropped = [self._pending.pop(one) for one in paths if one in self._pending]
        # Cancelling runs the callback at once, and the callback takes the lock.
        for future in dropped:
            future.cancel()

    def close(self) -> None:
        """Stop fetching. Safe to repeat."""
        self.forget()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
