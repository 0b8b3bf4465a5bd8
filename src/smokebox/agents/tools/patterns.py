"""Matching of relative paths, as text, against glob patterns as models write them."""

from __future__ import annotations

from fnmatch import fnmatchcase


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
