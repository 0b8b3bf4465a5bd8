"""What one command has seen of a bucket, so that it need not ask again.

A listing answers for the names in it while a command goes through them, and for names that
are not in it only while it is fresh. `forget` drops all: the next command asks anew.
"""

from __future__ import annotations

import posixpath
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from smokebox.sandbox.filesystems.objects import DIRECTORY, Found

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")

# Seconds. What was seen holds for as long as a command may take to go through it. That
# something is not there, or a second look at the same directory, is about what changes.
HOLDS = 30.0
FRESH = 1.0


class Listing:
    """One directory as it was seen.

    `given` tells that somebody has had all of it. The rest is for whoever walks on below it:
    `descents` counts the directories in it that were listed, `walks` the long listings, which
    have come as far as the key `reached`, or to the end of `everything`.
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
        self, found: Mapping[str, Found], came: float, lasting: float, given: bool
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
        """Whether it may tell what is there."""
        return time.monotonic() - self._came < self._lasting

    @property
    def tells_absence(self) -> bool:
        """Whether it may tell what is not there."""
        return time.monotonic() - self._came < (FRESH if self.given else self._lasting)

    def after(self, name: str) -> Iterator[str]:
        """The names that follow `name`, sorted; all of them for one that is not here."""
        if not self._order:
            self._order = sorted(self.found)
            self._positions = {name: place for place, name in enumerate(self._order)}
        for place in range(self._positions.get(name, -1) + 1, len(self._order)):
            yield self._order[place]


class Sightings:
    """What was seen, by path. Threads share it: what one saw serves the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Without anybody who tells when a command starts, nothing is believed for long.
        self.holds = FRESH
        # Counts the changes: what was asked before one must not be remembered after it.
        self.changes = 0
        self._listings: dict[str, Listing] = {}
        self._single: dict[str, tuple[Found | None, float]] = {}

    def look(self, path: str) -> tuple[bool, Found | None]:
        """Whether something is known of `path`, and what: None for nothing there."""
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
        """A directory that was seen, for a reader that wants all of it.

        A second reader in the same command means to see what changed, so it gets a fresh one.
        """
        listing = self.peek(path)
        if listing is None or not listing.tells_absence:
            return None
        listing.given = True
        return listing

    def peek(self, path: str) -> Listing | None:
        """A directory that was seen, if it still holds."""
        with self._lock:
            listing = self._listings.get(path)
        return listing if listing is not None and listing.holds else None

    def note(self, path: str, found: Found | None, *, asked: int) -> None:
        """Remember what is at one path, `asked` when there had been so many changes."""
        with self._lock:
            if self.changes == asked:
                self._single[path] = (found, time.monotonic())

    def add(
        self, listings: Mapping[str, Mapping[str, Found]], *, asked: int, given: bool = True
    ) -> None:
        """Remember directories that were seen at once, ahead of who wants them if not `given`."""
        came = time.monotonic()
        with self._lock:
            if self.changes == asked:
                for path, found in listings.items():
                    self._listings[path] = Listing(found, came, self.holds, given)

    def drop(self, path: str, *, tree: bool = False) -> None:
        """Forget `path` and what was listed beside it, with `tree` also what is below it."""
        with self._lock:
            self.changes += 1
            self._single.pop(path, None)
            self._listings.pop(path, None)
            self._listings.pop(posixpath.dirname(path), None)
            if tree:
                self._single = _outside(path + "/", self._single)
                self._listings = _outside(path + "/", self._listings)

    def forget(self) -> None:
        """Forget everything."""
        with self._lock:
            self.changes += 1
            self._listings.clear()
            self._single.clear()

    def following(self, path: str) -> Iterator[tuple[str, Found]]:
        """The files that a walk reads after `path`, as far as they were seen."""
        while path != "/":
            above, name = posixpath.split(path)
            listing = self.peek(above)
            if listing is None:
                return
            yield from self._files(above, listing, name)
            path = above

    def _files(
        self, directory: str, listing: Listing, name: str = ""
    ) -> Iterator[tuple[str, Found]]:
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
