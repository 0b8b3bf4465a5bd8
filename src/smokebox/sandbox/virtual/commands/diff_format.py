"""How `diff` writes changes: normal, unified and context format."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from smokebox.sandbox.virtual.commands.date_format import format_time
from smokebox.sandbox.virtual.commands.date_zone import zone_from

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.sandbox.virtual.commands.diff_lines import Change
    from smokebox.types import FileInfo

_TIME = "%Y-%m-%d %H:%M:%S.%N %z"
_NO_NEWLINE = "\n\\ No newline at end of file\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two files: its lines with their ends, and how its head names it."""

    lines: list[str]
    name: str
    label: str | None = None
    info: FileInfo | None = None

    def head(self, zone: str | None) -> str:
        """The name and the time, or the label in place of both."""
        if self.label is not None:
            return self.label
        mtime = (self.info.mtime if self.info else None) or 0.0
        moment = datetime.fromtimestamp(mtime, zone_from(zone) if zone else UTC)
        return f"{self.name}\t{format_time(_TIME, moment, int(mtime % 1 * 1_000_000_000))}"


def _written(mark: str, lines: list[str]) -> str:
    return "".join(f"{mark}{x if x.endswith(chr(10)) else x + _NO_NEWLINE}" for x in lines)


def normal(a: Side, b: Side, found: list[Change]) -> str:
    """The format of plain `diff`: `2c2`, `<` and `>`."""
    parts = []
    for change in found:
        old, new = a.lines[change.a_start : change.a_end], b.lines[change.b_start : change.b_end]
        letter = "c" if old and new else "d" if old else "a"
        where = _range(change.a_start, change.a_end) + letter + _range(change.b_start, change.b_end)
        middle = "---\n" if old and new else ""
        parts.append(f"{where}\n{_written('< ', old)}{middle}{_written('> ', new)}")
    return "".join(parts)


def _range(start: int, end: int) -> str:
    if end <= start + 1:
        return str(end if end > start else start)
    return f"{start + 1},{end}"


def _hunks(found: list[Change], size: int) -> Iterator[list[Change]]:
    """Changes that share context, together."""
    group: list[Change] = []
    for change in found:
        if group and change.a_start - group[-1].a_end > 2 * size:
            yield group
            group = []
        group.append(change)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Window:
    """The lines a hunk shows, of either file."""

    a_low: int
    a_high: int
    b_low: int
    b_high: int


def _window(a: Side, b: Side, group: list[Change], size: int) -> _Window:
    before = min(size, group[0].a_start, group[0].b_start)
    a_room, b_room = len(a.lines) - group[-1].a_end, len(b.lines) - group[-1].b_end
    after = min(size, a_room, b_room)
    return _Window(
        group[0].a_start - before,
        group[-1].a_end + after,
        group[0].b_start - before,
        group[-1].b_end + after,
    )


def unified(a: Side, b: Side, found: list[Change], size: int, zone: str | None) -> str:
    """The format of `diff -u`."""
    parts = [f"--- {a.head(zone)}\n+++ {b.head(zone)}\n"]
    for group in _hunks(found, size):
        w = _window(a, b, group, size)
        parts.append(f"@@ -{_span(w.a_low, w.a_high)} +{_span(w.b_low, w.b_high)} @@\n")
        place = w.a_low
        for change in group:
            parts.append(_written(" ", a.lines[place : change.a_start]))
            parts.append(_written("-", a.lines[change.a_start : change.a_end]))
            parts.append(_written("+", b.lines[change.b_start : change.b_end]))
            place = change.a_end
        parts.append(_written(" ", a.lines[place : w.a_high]))
    return "".join(parts)


def _span(start: int, end: int) -> str:
    count = end - start
    return str(end) if count == 1 else f"{start + 1 if count else start},{count}"


def context(a: Side, b: Side, found: list[Change], size: int, zone: str | None) -> str:
    """The format of `diff -c`."""
    parts = [f"*** {a.head(zone)}\n--- {b.head(zone)}\n"]
    for group in _hunks(found, size):
        w = _window(a, b, group, size)
        parts.append(f"***************\n*** {_pair(w.a_low, w.a_high)} ****\n")
        if any(change.a_start < change.a_end for change in group):
            runs = [(c.a_start, c.a_end, c.b_start < c.b_end) for c in group]
            parts.append(_marked(a.lines, w.a_low, w.a_high, runs, "-"))
        parts.append(f"--- {_pair(w.b_low, w.b_high)} ----\n")
        if any(change.b_start < change.b_end for change in group):
            runs = [(c.b_start, c.b_end, c.a_start < c.a_end) for c in group]
            parts.append(_marked(b.lines, w.b_low, w.b_high, runs, "+"))
    return "".join(parts)


def _pair(start: int, end: int) -> str:
    if end <= start + 1:
        return str(end)
    return f"{start + 1},{end}"


def _marked(
    lines: list[str], low: int, high: int, runs: list[tuple[int, int, bool]], sign: str
) -> str:
    parts = []
    place = low
    for start, end, both in runs:
        parts.append(_written("  ", lines[place:start]))
        parts.append(_written("! " if both else f"{sign} ", lines[start:end]))
        place = end
    parts.append(_written("  ", lines[place:high]))
    return "".join(parts)
