"""Shortest edit between two lists of lines, by Myers' algorithm, within a budget."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Steps before the search accepts a longer edit: about a second of work.
_BUDGET = 1_000_000


@dataclass(frozen=True, slots=True)
class Change:
    """Lines `a_start` to `a_end` of file a, replaced by `b_start` to `b_end` of file b."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int


def changes(a: Sequence[object], b: Sequence[object]) -> list[Change]:
    """Return the differences between two lists, in order and not adjacent."""
    numbers: dict[object, int] = {}
    left = [numbers.setdefault(line, len(numbers)) for line in a]
    right = [numbers.setdefault(line, len(numbers)) for line in b]
    deleted, inserted = _unmatched(left, right)
    _slide(deleted, inserted, left)
    _slide(inserted, deleted, right)
    return _collect(deleted, inserted)


class _Marks(NamedTuple):
    """For each line of either side, 1 if it has no match on the other."""

    deleted: bytearray
    inserted: bytearray


def _unmatched(a: list[int], b: list[int]) -> _Marks:
    # Lines that the other side lacks entirely are excluded from the search.
    common = set(a) & set(b)
    a_rest = [n for n, line in enumerate(a) if line in common]
    b_rest = [n for n, line in enumerate(b) if line in common]
    search = _EditSearch([a[n] for n in a_rest], [b[n] for n in b_rest])
    search.compare(0, len(a_rest), 0, len(b_rest))
    marks = _Marks(bytearray(b"\1" * len(a)), bytearray(b"\1" * len(b)))
    for place, mark in zip(a_rest, search.deleted, strict=True):
        marks.deleted[place] = mark
    for place, mark in zip(b_rest, search.inserted, strict=True):
        marks.inserted[place] = mark
    return marks


class _EditSearch:
    """Linear-space search that marks the lines without a match."""

    def __init__(self, a: list[int], b: list[int]) -> None:
        self.a, self.b = a, b
        self.deleted = bytearray(len(a))
        self.inserted = bytearray(len(b))
        self.budget = _BUDGET

    def compare(self, a_low: int, a_high: int, b_low: int, b_high: int) -> None:
        """Compare two ranges, halving them until one is empty."""
        pending = [(a_low, a_high, b_low, b_high)]
        while pending:
            a_low, a_high, b_low, b_high = pending.pop()
            a, b = self.a, self.b
            while a_low < a_high and b_low < b_high and a[a_low] == b[b_low]:
                a_low += 1
                b_low += 1
            while a_low < a_high and b_low < b_high and a[a_high - 1] == b[b_high - 1]:
                a_high -= 1
                b_high -= 1
            if a_low == a_high or b_low == b_high:
                self._replace(a_low, a_high, b_low, b_high)
                continue
            if self.budget <= 0:
                anchors = self._anchors(a_low, a_high, b_low, b_high)
                if not anchors:
                    self._replace(a_low, a_high, b_low, b_high)
                for x, y in anchors:
                    pending.append((a_low, x, b_low, y))
                    a_low, b_low = x + 1, y + 1
                pending += [(a_low, a_high, b_low, b_high)] if anchors else []
                continue
            x, y = self._middle(a_low, a_high, b_low, b_high)
            pending.append((x, a_high, y, b_high))
            pending.append((a_low, x, b_low, y))

    def _replace(self, a_low: int, a_high: int, b_low: int, b_high: int) -> None:
        self.deleted[a_low:a_high] = b"\1" * (a_high - a_low)
        self.inserted[b_low:b_high] = b"\1" * (b_high - b_low)

    def _middle(self, a_low: int, a_high: int, b_low: int, b_high: int) -> tuple[int, int]:
        """Return a point on a shortest edit, searching from both ends."""
        a, b = self.a, self.b
        top, bottom = a_low - b_low, a_high - b_high
        odd = (top - bottom) & 1
        low, high = a_low - b_high, a_high - b_low
        forward = {top: a_low, low - 1: -1}
        backward = {bottom: a_high}
        f_min = f_max = top
        b_min = b_max = bottom
        far = len(a) + 1
        while True:
            f_min, f_max = _widen(f_min, f_max, low, high, forward, -1)
            for d in range(f_max, f_min - 1, -2):
                down, across = forward.get(d - 1, -1), forward.get(d + 1, -1)
                x = start = across if down < across else down + 1
                y = x - d
                while x < a_high and y < b_high and a[x] == b[y]:
                    x += 1
                    y += 1
                self.budget -= x - start + 1
                forward[d] = x
                if odd and b_min <= d <= b_max and backward.get(d, far) <= x:
                    return x, y
            b_min, b_max = _widen(b_min, b_max, low, high, backward, far)
            for d in range(b_max, b_min - 1, -2):
                down, across = backward.get(d - 1, far), backward.get(d + 1, far)
                x = start = down if down < across else across - 1
                y = x - d
                while x > a_low and y > b_low and a[x - 1] == b[y - 1]:
                    x -= 1
                    y -= 1
                self.budget -= start - x + 1
                backward[d] = x
                if not odd and f_min <= d <= f_max and x <= forward.get(d, -1):
                    return x, y
            if self.budget <= 0:
                return a_low, b_low

    def _anchors(self, a_low: int, a_high: int, b_low: int, b_high: int) -> list[tuple[int, int]]:
        """Return lines that occur once on each side, as many as are in the same order."""
        once_a = _once(self.a, a_low, a_high)
        once_b = _once(self.b, b_low, b_high)
        tails: list[int] = []
        chain: list[tuple[int, int, int]] = []
        ends: list[int] = []
        for x, y in sorted((x, once_b[line]) for line, x in once_a.items() if line in once_b):
            place = bisect.bisect_left(tails, y)
            before = ends[place - 1] if place else -1
            tails[place : place + 1] = [y]
            ends[place : place + 1] = [len(chain)]
            chain.append((x, y, before))
        found: list[tuple[int, int]] = []
        link = ends[-1] if ends else -1
        while link >= 0:
            x, y, link = chain[link]
            found.append((x, y))
        return found[::-1]


def _once(lines: list[int], low: int, high: int) -> dict[int, int]:
    counts = Counter(lines[low:high])
    return {line: n for n, line in enumerate(lines[low:high], low) if counts[line] == 1}


def _widen(
    least: int, most: int, low: int, high: int, reached: dict[int, int], nowhere: int
) -> tuple[int, int]:
    """Widen the search by a diagonal on either side, or narrow it at the edge of the grid."""
    if least > low:
        least -= 1
        reached[least - 1] = nowhere
    else:
        least += 1
    if most < high:
        most += 1
        reached[most + 1] = nowhere
    else:
        most -= 1
    return least, most


def _slide(changed: bytearray, other: bytearray, lines: list[int]) -> None:
    """Move runs of changed lines to where people expect them.

    Where the surrounding lines allow it, a run joins its neighbours, ends as far down as possible,
    and moves back up to the last place where the other file has a run as well.
    """
    waiting = _runs(changed)[::-1]
    met = {start - before for start, before in _starts(_runs(other))}
    done: list[tuple[int, int]] = []
    gone = 0  # changed lines before the run at hand: its start less these is its gap
    while waiting:
        start, end = waiting.pop()
        length = 0
        while length != end - start:
            length = end - start
            while start and lines[start - 1] == lines[end - 1]:
                start, end = start - 1, end - 1
                if done and done[-1][1] == start:
                    start, joined = done.pop()
                    gone -= joined - start
            meeting = end if start - gone in met else None
            while end < len(lines) and lines[start] == lines[end]:
                start, end = start + 1, end + 1
                if waiting and waiting[-1][0] == end:
                    end = waiting.pop()[1]
                meeting = end if start - gone in met else meeting
        if meeting is not None:
            start, end = start - (end - meeting), meeting
        done.append((start, end))
        gone += end - start
    changed[:] = bytes(len(changed))
    for start, end in done:
        changed[start:end] = b"\1" * (end - start)


def _runs(changed: bytearray) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(rb"\x01+", changed)]


def _starts(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield each run's start, with the number of changed lines before it."""
    before = 0
    for start, end in runs:
        yield start, before
        before += end - start


def _collect(deleted: bytearray, inserted: bytearray) -> list[Change]:
    found: list[Change] = []
    i = j = 0
    while i < len(deleted) or j < len(inserted):
        a_start, b_start = i, j
        while i < len(deleted) and deleted[i]:
            i += 1
        while j < len(inserted) and inserted[j]:
            j += 1
        if (a_start, b_start) != (i, j):
            found.append(Change(a_start, i, b_start, j))
        else:
            i += 1
            j += 1
    return found
