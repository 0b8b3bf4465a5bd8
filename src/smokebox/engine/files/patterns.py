"""Patterns that pick paths below a directory, as in ignore files: `*.py`, `src/**/*.ts`, `.git`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from smokebox.errors import InvalidOption
from smokebox.foundation.paths import check_path
from smokebox.sandbox.globbing import expand_braces

if TYPE_CHECKING:
    from collections.abc import Sequence

Segments: TypeAlias = list[Callable[[str], object] | None]

MOST = 100
LONGEST = 1_000


class Patterns:
    """A set of patterns. One without a slash fits a name at any depth; `**` crosses directories."""

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        if (
            isinstance(patterns, str)
            or len(patterns) > MOST
            or max(map(len, patterns), default=0) > LONGEST
        ):
            raise InvalidOption(
                f"{option} is a list of at most {MOST} patterns of {LONGEST} characters.",
                hint=f'Pass for example {option}=["*.py"].',
                option=option,
            )
        self._compiled = [
            compiled(text) for pattern in patterns for text in expand_braces(check_path(pattern))
        ]

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def fit(self, path: str) -> bool:
        """Whether one of them fits a relative path as a whole."""
        names = path.split("/")
        return any(fits(segments, names) for segments in self._compiled)

    def cover(self, path: str) -> bool:
        """Whether one of them fits a relative path or a directory above it."""
        if not self._compiled:
            return False
        names = path.split("/")
        return any(
            fits(segments, names[:count])
            for count in range(1, len(names) + 1)
            for segments in self._compiled
        )


def compiled(pattern: str) -> Segments:
    """A pattern, name by name; None stands for `**`."""
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if "/" not in pattern.rstrip("/"):
        names.insert(0, "**")
    return [None if name == "**" else re.compile(fnmatch.translate(name)).match for name in names]


def fits(segments: Segments, names: list[str]) -> bool:
    """Follow every way to fit at once, so that no pattern takes longer than its length asks."""
    states = _skipped({0}, segments)
    for name in names:
        ahead: set[int] = set()
        for state in states:
            if state == len(segments):
                continue
            match = segments[state]
            if match is None:
                ahead |= {state, state + 1} if state + 1 == len(segments) else {state}
            elif match(name):
                ahead.add(state + 1)
        states = _skipped(ahead, segments)
    return len(segments) in states


def _skipped(states: set[int], segments: Segments) -> set[int]:
    """The states and, as `**` also stands for nothing except at the end, those behind one."""
    closed = set(states)
    for state in states:
        while state + 1 < len(segments) and segments[state] is None:
            state += 1
            closed.add(state)
    return closed
