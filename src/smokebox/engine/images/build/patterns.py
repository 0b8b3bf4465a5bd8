"""Wildcards in the sources of COPY, as Go's `filepath.Match` reads them."""

from __future__ import annotations

import re

_MAGIC = re.compile(r"[*?\[\\]")


def has_wildcard(text: str) -> bool:
    """Return True if a name is a pattern."""
    return _MAGIC.search(text) is not None


def compile_name(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for one name of a path. Raises ValueError."""
    out, i = "", 0
    while i < len(pattern):
        char = pattern[i]
        i += 1
        if char == "*":
            out += ".*"
        elif char == "?":
            out += "."
        elif char == "\\":
            if i == len(pattern):
                raise ValueError(f"the pattern {pattern!r} ends with a backslash")
            out += re.escape(pattern[i])
            i += 1
        elif char == "[":
            end = _class_end(pattern, i)
            body = pattern[i:end]
            negated = body.startswith("^")
            out += f"[{'^' if negated else ''}{_class_body(body[negated:])}]"
            i = end + 1
        else:
            out += re.escape(char)
    return re.compile(out, re.DOTALL)


def _class_end(pattern: str, start: int) -> int:
    i = start + (pattern[start : start + 1] == "^")
    while i < len(pattern):
        if pattern[i] == "\\":
            i += 1
        elif pattern[i] == "]" and i > start:
            return i
        i += 1
    raise ValueError(f"the pattern {pattern!r} has no closing bracket")


def _class_body(body: str) -> str:
    return re.sub(r"([\[&~|^])", r"\\\1", body)
