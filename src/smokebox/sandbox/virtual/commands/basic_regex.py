"""POSIX basic regular expressions, translated to Python's."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from smokebox.sandbox.virtual.commands.arguments import UsageError

_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "space": r"\s", "blank": r" \t", "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_MOST_WORK = 10**8
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\[:\w+:\]|[^\]])*\]|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BasicPattern:
    """Compiled pattern with a bound on its cost.

    Python's matcher backtracks: with `n` repeats, a line costs its length to the power of `n + 1`,
    and a match cannot be interrupted.
    """

    text: str
    compiled: re.Pattern[str]
    repeats: int

    def is_in(self, line: str) -> bool:
        """Return whether it matches somewhere in the line."""
        if len(line) ** (self.repeats + 1) > _MOST_WORK and self.repeats:
            raise UsageError(
                f"'{self.text}': too many repeats for a line of {len(line)} characters"
            )
        return self.compiled.search(line) is not None


@functools.lru_cache(maxsize=128)
def compile_basic(text: str) -> BasicPattern:
    """Compile a pattern; raise `UsageError` if it is invalid or repeats a group."""
    parts = [_translated(token, n == 0) for n, token in enumerate(_TOKEN.findall(text))]
    source = "".join(parts)
    if re.search(r"(?<!\\)\)[*+?{]", source):
        raise UsageError(f"'{text}': repeated groups are not supported")
    try:
        return BasicPattern(text, re.compile(source), sum(p in ("*", "+", "{") for p in parts))
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
