"""Caches of a bucket's listings and bodies, and read-ahead for commands that scan.

A listing is valid for the names in it while a command works through them, and for names that are
missing from it only while it is fresh. `forget` drops everything before the next command.
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
from smokebox.sandbox.filesystems.objects import DIRECTORY, ObjectEntry, add

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.sandbox.filesystems.objects import ObjectBody, ObjectEntry, Objects, ObjectWalk


T = TypeVar("T")

# Seconds. A listing is valid for as long as a command may take to work through it. A missing name,
# or a second listing of the same directory, is more likely to look for a change.
HOLDS = 30.0
FRESH = 1.0


class Listing:
    """Cached listing of one directory.

    `given` is set once a caller has received all of it. `descents` counts listed subdirectories,
    `walks` the long listings below it, which have reached the key `reached`, or the end if
    `everything` is set.
    """

    __slots__ = (
        "_came",
        "_lasting",
        "_order",
        "_positions",
        "descents",
        "everything",
        "found",
        "given",
        "reached",
        "walks",
    )

    def __init__(
        self, found: Mapping[str, ObjectEntry], came: float, lasting: float, given: bool
    ) -> None:
        self.found = found
        self.given = given
        self._came = came
        self._lasting = lasting
        self.descents = 0
        self.walks = 0
        self.reached = ""
        self.everything = False
        self._order: list[str] = []
        self._positions: dict[str, int] = {}

    @property
    def holds(self) -> bool:
        """Return whether a name in the listing can be trusted."""
        return time.monotonic() - self._came < self._lasting

    @property
    def tells_absence(self) -> bool:
        """Return whether the absence of a name can be trusted."""
        return time.monotonic() - self._came < (FRESH if self.given else self._lasting)

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
        self.holds = FRESH
        # Counts changes: a response requested before a change must not be cached after it.
        self.changes = 0
        self._listings: dict[str, Listing] = {}
        self._single: dict[str, tuple[ObjectEntry | None, float]] = {}

    def look(self, path: str) -> tuple[bool, ObjectEntry | None]:
        """Return whether `path` is cached, and its entry: None if nothing is there."""
        with self._lock:
            single = self._single.get(path)
            listing = self._listings.get(posixpath.dirname(path))
            own = self._listings.get(path)
        if single is not None and time.monotonic() - single[1] < FRESH:
            return True, single[0]
        if listing is not None:
            found = listing.found.get(posixpath.basename(path))
            if listing.holds if found is not None else listing.tells_absence:
                return True, found
        if own is not None and own.tells_absence:
            return True, DIRECTORY
        return False, None

    def listing(self, path: str) -> Listing | None:
        """Return the cached listing of a directory for a caller that needs all of it.

        A second call in the same command looks for changes, so it gets a fresh listing only.
        """
        listing = self.peek(path)
        if listing is None or not listing.tells_absence:
            return None
        listing.given = True
        return listing

    def peek(self, path: str) -> Listing | None:
        """Return the cached listing of a directory if it is still valid."""
        with self._lock:
            listing = self._listings.get(path)
        return listing if listing is not None and listing.holds else None

    def note(self, path: str, found: ObjectEntry | None, *, asked: int) -> None:
        """Cache the entry of one path, unless something changed since `asked`."""
        with self._lock:
            if self.changes == asked:
                self._single[path] = (found, time.monotonic())

    def add(
        self, listings: Mapping[str, Mapping[str, ObjectEntry]], *, asked: int, given: bool = True
    ) -> None:
        """Cache listings, unless something changed since `asked`; `given=False` marks listings read
        ahead.
        """
        came = time.monotonic()
        with self._lock:
            if self.changes == asked:
                for path, found in listings.items():
                    self._listings[path] = Listing(found, came, self.holds, given)

    def drop(self, path: str, *, tree: bool = False) -> None:
        """Drop `path` and the listing it is in; with `tree` also everything below it."""
        with self._lock:
            self.changes += 1
            self._single.pop(path, None)
            self._listings.pop(path, None)
            self._listings.pop(posixpath.dirname(path), None)
            if tree:
                self._single = _outside(path + "/", self._single)
                self._listings = _outside(path + "/", self._listings)

    def forget(self) -> None:
        """Drop everything."""
        with self._lock:
            self.changes += 1
            self._listings.clear()
            self._single.clear()

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
    made: dict[str, dict[str, ObjectEntry]] = {top: {}}
    empty: list[str] = []
    for key, found in walked.found:
        path = "/" + key
        if path == top:
            continue
        above, _, name = path.rpartition("/")
        inside = made.get(above or "/")
        if inside is None:
            inside = _add_above(made, above, top)
        if name == marker:
            continue
        add(inside, name, found)
        if not found.entry.size:
            empty.append(path)
    for path in empty:
        above, name = posixpath.split(path)
        if above in made and not made[above][name].is_directory:
            del made[above]
    cuts = [after] if walked.ended or not walked.found else [after, walked.found[-1][0]]
    for key in filter(None, cuts):
        for above in _upward(posixpath.dirname("/" + key), top):
            made.pop(above, None)
    return made


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
    made: dict[str, dict[str, ObjectEntry]], directory: str, top: str
) -> dict[str, ObjectEntry]:
    """Add a directory and its missing parents, and return its entries so far."""
    for path in _upward(directory, top):
        if path in made:
            break
        made[path] = {}
    for path in _upward(directory, top):
        if path == top:
            break
        above, name = posixpath.split(path)
        _add_directory(made[above], name)
    return made[directory]


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
_RUN = 2
_FIRST = 4


class BodyCache:
    """LRU cache of bodies by path, bounded by `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, ObjectBody] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0

    def get(self, path: str) -> ObjectBody | None:
        """Return the cached body of `path`, of any version."""
        with self._lock:
            body = self._held.get(path)
            if body is not None:
                self._held.move_to_end(path)
            return body

    def holds(self, path: str, version: str) -> bool:
        """Return whether this version of the body is cached."""
        with self._lock:
            body = self._held.get(path)
            return body is not None and body.version == version

    def put(self, path: str, body: ObjectBody) -> None:
        """Cache a body, unless it would evict most of the others."""
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
        """Drop a body."""
        with self._lock:
            body = self._held.pop(path, None)
            if body is not None:
                self.size -= len(body.data)


class _Run:
    """Progress of a scan that reads files in listing order."""

    last = ""
    length = 0
    look_at = _RUN
    suffix: str | None = ""


class _OwnRun(_Run, threading.local):
    """One scan per thread."""


class ReadAhead:
    """Fetches up to `limit` objects in parallel ahead of a thread that scans."""

    def __init__(
        self, objects: Objects, listings: ListingCache, bodies: BodyCache, limit: int
    ) -> None:
        self._objects = objects
        self._sightings = listings
        self._bodies = bodies
        self._limit = limit
        self._run: _Run = _OwnRun()
        self._lock = threading.Lock()
        self._coming: dict[str, Future[ObjectBody | None]] = {}
        self._bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    def share(self) -> None:
        """Treat the reads of all threads as one scan."""
        self._run = _Run()

    def take(self, path: str) -> ObjectBody | None:
        """Return the body being fetched for `path`; None if there is none, or it failed."""
        with self._lock:
            coming = self._coming.get(path)
        if coming is None or coming.cancelled():
            return None
        try:
            return coming.result()
        except SmokeboxError:
            # The reader fetches it itself and reports the error.
            return None

    def read(self, path: str) -> None:
        """Record a read of `path`, and fetch the files that are likely to follow."""
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
            # Wait until half of the batch was read before fetching more.
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
        """Return the files that follow, filtered by suffix if all reads so far had the same one
        (`*.md`).
        """
        for following, _ in self._sightings.following(path):
            if suffix is None or posixpath.splitext(following)[1] == suffix:
                yield following

    def _fetch(self, paths: Iterator[str]) -> None:
        for path in paths:
            _, found = self._sightings.look(path)
            if found is not None and not found.is_directory and found.entry.size <= AHEAD_SIZE:
                self._start(path, found)

    def _start(self, path: str, found: ObjectEntry) -> None:
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

    def _arrived(self, path: str, size: int, done: Future[ObjectBody | None]) -> None:
        body = None if done.cancelled() or done.exception() else done.result()
        with self._lock:
            self._bytes -= size
            # A body requested before a change must not be cached after it.
            if self._coming.get(path) is not done:
                return
            # Cache it before it leaves the pending set: a reader finds it in one or the other.
            if body is not None:
                self._bodies.put(path, body)
            del self._coming[path]

    def forget(self, path: str | None = None) -> None:
        """Drop pending fetches: of one path, or all."""
        with self._lock:
            paths = list(self._coming) if path is None else [path]
            disowned = [self._coming.pop(one) for one in paths if one in self._coming]
        # Cancelling runs the callback at once, and the callback takes the lock.
        for coming in disowned:
            coming.cancel()

    def close(self) -> None:
        """Stop fetching. Safe to repeat."""
        self.forget()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
