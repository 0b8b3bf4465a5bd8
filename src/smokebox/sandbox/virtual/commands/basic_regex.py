"""POSIX basic regular expressions, as Python's."""

from __future__ import annotations

import functools
import re

from smokebox.sandbox.virtual.commands.arguments import UsageError

_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "space": r"\s", "blank": r" \t", "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\[:\w+:\]|[^\]])*\]|.", re.DOTALL)


@functools.lru_cache(maxsize=128)
def compile_basic(text: str) -> re.Pattern[str]:
    """The pattern, or `UsageError` where it is none. Repeats nested in groups are refused.

    Python's matcher backtracks: `\\(a*\\)*` could run for years, and cannot be stopped.
    """
    parts = [_translated(token, n == 0) for n, token in enumerate(_TOKEN.findall(text))]
    source = "".join(parts)
    if re.search(r"[*+?}][^(]*\)(?:[*+?]|\{)", source):
        raise UsageError(f"'{text}': a repeat inside a repeated group is not supported")
    try:
        return re.compile(source)
    except re.error:
        raise UsageError(f"'{text}': invalid regular expression") from None


def _translated(token: str, first: bool) -> str:
    if token.startswith("[") and len(token) > 1:
        return _bracket(token)
    if token.startswith("\\"):
        return token[1] if token[1] in "(){}+?|" else token
    if token == "*" and first:
        return r"\*"
    return f"\\{token}" if token in "(){}+?|" else token


def _bracket(token: str) -> str:
    inner = re.sub(
        r"\[:(\w+):\]", lambda m: _CLASSES.get(m[1], ""), token[1:-1].replace("\\", r"\\")
    )
    negated = inner.startswith("^")
    inner = inner[1:] if negated else inner
    inner = inner.replace("[", r"\[") if "[" in inner and r"\[" not in inner else inner
    return f"[{'^' if negated else ''}{inner.replace(']', chr(92) + ']')}]"
