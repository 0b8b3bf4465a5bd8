"""Reads what grep and ripgrep write, in pieces of any size and in bounded memory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.agents.tools.patterns import matches
from smokebox.agents.tools.truncation import shorten_line
from smokebox.sandbox.globbing import expand_braces

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MATCHES = 100
# Past this many a search is stopped: the model will narrow it anyway.
MAX_COUNTED = 10_000

_MAX_RECORD = 8192
_MAX_KEPT = 5000
_RECORD = re.compile(r"([^\0]*)\0(\d+)([:-])(.*)", re.DOTALL)
_PLAIN_RECORD = re.compile(r"(.+?)[:-](\d+)([:-])(.*)")
# Lines between the records, which have no NUL of their own and stick to the next name.
_NOISE = re.compile(
    r"(?:--\n|[^\n]*(?:stopped searching binary file|binary file matches)[^\n]*\n)+"
)


@dataclass(frozen=True, slots=True, order=True)
class Hit:
    """A line that was found, or where `is_match` is false one beside it."""

    path: str
    line: int
    is_match: bool
    text: str


class Hits:
    """Counts matches, and keeps the first in the order of path and line.

    `plain` is for a grep that cannot put a NUL after the name, where a name that looks
    like `a:1:b` is misread.
    """

    def __init__(
        self, root: str, *, include: str | None, skipped: Sequence[str], plain: bool
    ) -> None:
        self.count = 0
        self._root = root.rstrip("/")
        self._skipped = frozenset(skipped)
        self._negated = include is not None and include.startswith("!")
        self._patterns = [] if include is None else expand_braces(include.removeprefix("!"))
        self._plain = plain
        self._buffer = ""
        self._cut = False
        self._kept: list[Hit] = []
        # Lines of one file come together, so the last answer is nearly always the next one.
        self._wanted = functools.lru_cache(maxsize=8)(self._is_wanted)

    def feed(self, text: str) -> bool:
        """Take the next piece of output; False when there is no point in more."""
        if self._cut:
            # We are in a line longer than anything we would show: go on at its end.
            if "\n" not in text:
                return True
            text = text[text.find("\n") :]
        self._buffer += text
        position = 0
        while self.count <= MAX_COUNTED and (end := self._end_of_record(position)) >= 0:
            self._take(self._buffer[position:end])
            position = end + 1
        rest = self._buffer[position:]
        self._buffer, self._cut = rest[:_MAX_RECORD], len(rest) > _MAX_RECORD
        return self.count <= MAX_COUNTED

    def first(self) -> list[Hit]:
        """The hits up to the hundredth match, after the last piece."""
        if self._buffer:
            self.feed("\n")
        self._prune()
        return self._kept

    def _end_of_record(self, start: int) -> int:
        # A name may hold line breaks: a record ends at the first one after its NUL.
        start = start if self._plain else self._buffer.find("\0", start)
        return self._buffer.find("\n", start) if start >= 0 else -1

    def _take(self, record: str) -> None:
        parsed = (_PLAIN_RECORD if self._plain else _RECORD).fullmatch(record)
        if parsed is None:
            return
        path, line, sign, text = parsed.groups()
        noise = _NOISE.match(path)
        path = path[noise.end() :] if noise else path
        if not self._wanted(path):
            return
        text = shorten_line(text.removesuffix("\r"))
        self.count += sign == ":"
        self._kept.append(Hit(path, int(line), sign == ":", text))
        if len(self._kept) > _MAX_KEPT:
            self._prune()

    def _is_wanted(self, path: str) -> bool:
        relative = path[len(self._root) :].lstrip("/") or path.rsplit("/", 1)[-1]
        if not self._skipped.isdisjoint(relative.split("/")):
            return False
        if not self._patterns:
            return True
        return self._negated != any(matches(pattern, relative) for pattern in self._patterns)

    def _prune(self) -> None:
        self._kept.sort()
        seen = 0
        for index, hit in enumerate(self._kept):
            seen += hit.is_match
            if seen > MAX_MATCHES:
                del self._kept[index:]
                break
