"""Glob patterns as models write them: braces, and matching of relative paths as text."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

MAX_EXPANSIONS = 64
_INNERMOST_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def expand_braces(pattern: str) -> list[str]:
    """`*.{ts,tsx}` as `*.ts` and `*.tsx`; past 64 of them, the rest stays as written."""
    done: list[str] = []
    waiting = [pattern]
    while waiting:
        current = waiting.pop(0)
        braces = _INNERMOST_BRACES.search(current)
        if braces is None or len(done) + len(waiting) >= MAX_EXPANSIONS:
            done.append(current)
            continue
        start, end = braces.span()
        waiting += [current[:start] + choice + current[end:] for choice in braces[1].split(",")]
    return list(dict.fromkeys(done))


def matches(pattern: str, path: str) -> bool:
    """Whether a relative path is one that `pattern`, without braces, covers.

    A pattern without a slash goes by the name alone, at any depth; one that ends with a
    slash means what is below; `**` crosses directories.
    """
    names = path.split("/")
    if "/" not in pattern:
        return fnmatchcase(names[-1], pattern)
    parts = f"{pattern}**" if pattern.endswith("/") else pattern
    return _match(parts.removeprefix("./").lstrip("/").split("/"), names)


def _match(parts: list[str], names: list[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        # Repeated, it means the same and would only cost time.
        if parts[1:2] == ["**"]:
            return _match(parts[1:], names)
        return any(_match(parts[1:], names[n:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _match(parts[1:], names[1:])
