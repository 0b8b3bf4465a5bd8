"""Tells whether a command goes on in the next line: an open quote, a heredoc, a loop."""

from __future__ import annotations

import functools
import re

import bashkit

# What bashkit's parser says when the text ends too early; anything else is a real mistake.
_TOO_EARLY = re.compile(r"unexpected EOF|unexpected end of|unterminated")


def unfinished(text: str) -> bool:
    """Whether `text` is the beginning of a command that more lines could complete."""
    stripped = text.rstrip()
    if stripped.endswith(("&&", "||")) or _ends_with_open_backslash(text):
        return True
    complaint = _complaint(text)
    if complaint:
        return bool(_TOO_EARLY.search(complaint))
    # A lone ")" is an error everywhere but in the body of a heredoc or of an array.
    return bool(stripped) and not _complaint(f"{text}\n)")


def _ends_with_open_backslash(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _complaint(text: str) -> str:
    try:
        _parser().analyze(text)
    except bashkit.BashError as error:
        return str(error) or "parse error"
    return ""


@functools.cache
def _parser() -> bashkit.Bash:
    return bashkit.Bash()
