"""Patterns for paths below a directory, as in ignore files: `*.py`, `src/**/*.ts`, `.git`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from smokebox.errors import InvalidOption
from smokebox.foundation.paths import check_path
from smokebox.sandbox.glob import expand_braces

if TYPE_CHECKING:
    from collections.abc import Sequence

Segments: TypeAlias = list[Callable[[str], object] | None]
"""A compiled pattern, one matcher for each name; None stands for `**`."""

MAX_PATTERNS = 100
MAX_LENGTH = 1_000


class Patterns:
    """A set of patterns. One without a slash matches a name at any depth."""

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        if (
            isinstance(patterns, str)
            or len(patterns) > MAX_PATTERNS
            or max(map(len, patterns), default=0) > MAX_LENGTH
        ):
            raise InvalidOption(
                f"{option} is a list of at most {MAX_PATTERNS} patterns of {MAX_LENGTH} "
                "characters.",
                hint=f'Pass for example {option}=["*.py"].',
                option=option,
            )
        self._compiled = [
            compile_pattern(text)
            for pattern in patterns
            for text in expand_braces(check_path(pattern))
        ]

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def match(self, path: str) -> bool:
        """Return whether a pattern matches the whole relative path."""
        names = path.split("/")
        return any(match_names(segments, names) for segments in self._compiled)

    def cover(self, path: str) -> bool:
        """Return whether a pattern matches the relative path or a directory above it."""
        if not self._compiled:
            return False
        names = path.split("/")
        return any(
            match_names(segments, names[:count])
            for count in range(1, len(names) + 1)
            for segments in self._compiled
        )


def compile_pattern(pattern: str) -> Segments:
    """Compile a pattern without braces."""
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if "/" not in pattern.rstrip("/"):
        names.insert(0, "**")
    return [None if name == "**" else re.compile(fnmatch.translate(name)).match for name in names]


def match_names(segments: Segments, names: list[str]) -> bool:
    """Match all alternatives of `**` in parallel, so that the time has no exponential case."""
    states = _skip_globstars({0}, segments)
    for name in names:
        following: set[int] = set()
        for state in states:
            if state == len(segments):
                continue
            match = segments[state]
            if match is None:
                following |= {state, state + 1} if state + 1 == len(segments) else {state}
            elif match(name):
                following.add(state + 1)
        states = _skip_globstars(following, segments)
    return len(segments) in states


def _skip_globstars(states: set[int], segments: Segments) -> set[int]:
    """Add the states behind each `**`, which matches no name as well, except at the end."""
    closed = set(states)
    for state in states:
        while state + 1 < len(segments) and segments[state] is None:
            state += 1
            closed.add(state)
    return closed
