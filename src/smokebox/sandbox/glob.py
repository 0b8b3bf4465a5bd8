"""Glob matching over directory listings, without access to any file."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from smokebox.errors import InvalidOption
from smokebox.foundation.paths import check_path

if TYPE_CHECKING:
    from smokebox.types import FileType

MAX_ALTERNATIVES = 1_000


class GlobEntry(NamedTuple):
    """One name in a directory.

    `kind` is that of a symlink's target, and "symlink" only for a dangling one. `is_symlink` is
    set for every symlink.
    """

    name: str
    kind: FileType
    is_symlink: bool = False


Lister = Callable[[str], Iterable[GlobEntry]]
"""Lists a directory, following symlinks; raises OSError if there is none."""


class Segment(NamedTuple):
    """One name of a pattern, compiled. Only a name with wildcards has a `match`."""

    text: str
    match: Callable[[str], object] | None
    is_globstar: bool
    takes_hidden: bool

    def accepts(self, name: str, hidden: bool) -> bool:
        """Return whether `name` matches; a dotfile only if `hidden` or the pattern has the dot."""
        if self.match is None:
            return name == self.text
        if name[0] == "." and not (hidden or self.takes_hidden):
            return False
        return self.match(name) is not None


MatchState = tuple[int, int]
"""Progress of a match: the alternative, and the index of its next segment."""


def glob_paths(
    pattern: str,
    cwd: str,
    list_directory: Lister,
    *,
    hidden: bool = False,
    files_only: bool = False,
) -> list[str]:
    """Return the sorted absolute paths that match `pattern` from `cwd`, without duplicates.

    `**` as a whole name crosses directories, never symlinks to them, and at the end matches
    everything below. `{a,b}` lists alternatives, a backslash quotes the next character, and a final
    slash matches directories only. A directory that cannot be wildcard has no matches.
    """
    glob = _Glob(_alternatives(check_path(pattern), cwd), list_directory, hidden)
    wanted = "file" if files_only else "directory" if pattern.endswith("/") else None
    if pattern.endswith("/") and files_only:
        return []
    return sorted({path for path, kind in glob.matches() if wanted in (None, kind)})


class _Glob:
    """One walk for all alternatives of a pattern; each directory is wildcard once per visit."""

    def __init__(
        self, alternatives: list[tuple[Segment, ...]], list_directory: Lister, hidden: bool
    ) -> None:
        self._alternatives = alternatives
        self._list_directory = list_directory
        self._hidden = hidden

    def matches(self) -> Iterator[tuple[str, FileType]]:
        """Yield paths and their kinds; a path can be yielded twice."""
        if not all(self._alternatives):
            yield "/", "directory"
        starts = {(n, 0) for n, segments in enumerate(self._alternatives) if segments}
        pending: list[tuple[str, set[MatchState]]] = [("/", starts)]
        while pending:
            directory, states = pending.pop()
            prefix = directory.rstrip("/") + "/"
            literal, wildcard = self._split(states)
            pending.extend((prefix + name, below) for name, below in literal.items())
            for entry in _entries(directory, self._list_directory) if wildcard else ():
                below, matched = self._advance(entry, wildcard)
                if below:
                    pending.append((prefix + entry.name, below))
                if matched:
                    yield prefix + entry.name, entry.kind

    def _split(
        self, states: set[MatchState]
    ) -> tuple[dict[str, set[MatchState]], list[MatchState]]:
        """Separate literal names before the last, which need no listing, from other segments."""
        literal: dict[str, set[MatchState]] = {}
        wildcard: list[MatchState] = []
        for alternative, index in self._with_globstars_skipped(states):
            segments = self._alternatives[alternative]
            if segments[index].match is None and index + 1 < len(segments):
                literal.setdefault(segments[index].text, set()).add((alternative, index + 1))
            else:
                wildcard.append((alternative, index))
        return literal, wildcard

    def _with_globstars_skipped(self, states: set[MatchState]) -> set[MatchState]:
        """Add the states after each `**`, which also matches zero directories."""
        closed = set(states)
        for alternative, index in states:
            segments = self._alternatives[alternative]
            while segments[index].is_globstar and index + 1 < len(segments):
                index += 1
                closed.add((alternative, index))
        return closed

    def _advance(self, entry: GlobEntry, states: list[MatchState]) -> tuple[set[MatchState], bool]:
        """Return the states below an entry, and whether the entry itself matches."""
        below: set[MatchState] = set()
        matched = False
        for alternative, index in states:
            segments = self._alternatives[alternative]
            segment = segments[index]
            if not segment.accepts(entry.name, self._hidden):
                continue
            is_last = index + 1 == len(segments)
            matched = matched or is_last
            if entry.kind != "directory":
                continue
            if not segment.is_globstar and not is_last:
                below.add((alternative, index + 1))
            elif segment.is_globstar and not entry.is_symlink:
                below.add((alternative, index))
        return below, matched


def _entries(directory: str, list_directory: Lister) -> list[GlobEntry]:
    try:
        return list(list_directory(directory))
    except (ConnectionError, TimeoutError):
        raise
    except OSError:
        return []


def _alternatives(pattern: str, cwd: str) -> list[tuple[Segment, ...]]:
    base = [_literal(name) for name in cwd.split("/") if name]
    return [tuple(_segments(base, text)) for text in expand_braces(pattern)]


def _segments(base: list[Segment], text: str) -> list[Segment]:
    segments = [] if text.startswith("/") else list(base)
    for name in text.split("/"):
        if name == "..":
            del segments[-1:]
        elif name not in ("", "."):
            segments.append(_segment(name))
    return segments


def _literal(name: str) -> Segment:
    return Segment(name, None, False, True)


@functools.lru_cache(maxsize=512)
def _segment(text: str) -> Segment:
    if text == "**":
        return Segment(text, _always, True, False)
    plain = re.sub(r"\\(.)", r"\1", text)
    if not re.search(r"[*?\[]", re.sub(r"\\.", "", text)):
        return _literal(plain)
    return Segment(text, re.compile(_translate(text)).match, False, plain.startswith("."))


def _always(name: str) -> object:
    return name


def _translate(text: str) -> str:
    # fnmatch supports neither backslashes nor [^...]; its regexes do not backtrack far.
    text = re.sub(r"\\([*?[])", r"[\1]", text)
    text = re.sub(r"\\(.)", r"\1", text)
    return fnmatch.translate(text.replace("[^", "[!"))


def expand_braces(pattern: str) -> list[str]:
    """Expand `*.{ts,tsx}` to `*.ts` and `*.tsx`, unordered. Raises `InvalidOption` for too many."""
    expanded: list[str] = []
    pending = [pattern]
    while pending:
        text = pending.pop()
        group = _first_group(text)
        if group is None:
            expanded.append(text)
        else:
            start, commas, end = group
            edges = [start, *commas, end]
            for left, right in itertools.pairwise(edges):
                pending.append(text[:start] + text[left + 1 : right] + text[end + 1 :])
        if len(pending) + len(expanded) > MAX_ALTERNATIVES:
            raise InvalidOption(
                f"the pattern {pattern!r} has more than {MAX_ALTERNATIVES} alternatives.",
                hint="Use fewer braces, or several calls.",
                option="pattern",
            )
    return expanded


def _first_group(text: str) -> tuple[int, list[int], int] | None:
    """Return the start, the commas and the end of the first `{a,b}`; braces without a comma are
    text.
    """
    opened: list[tuple[int, list[int]]] = []
    groups: list[tuple[int, list[int], int]] = []
    escaped = False
    for position, letter in enumerate(text):
        if escaped or letter == "\\":
            escaped = not escaped
        elif letter == "{":
            opened.append((position, []))
        elif letter == "," and opened:
            opened[-1][1].append(position)
        elif letter == "}" and opened:
            start, commas = opened.pop()
            if commas:
                groups.append((start, commas, position))
    return min(groups, default=None)
