""".gitignore files of a tree, applied from outside the sandbox without git.

The rules are those of git: the last matching pattern decides, deeper files override higher ones,
`!` includes again, and nothing in an excluded directory can be included again. Unlike in git,
tracked files are excluded too.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from typing import TYPE_CHECKING, NamedTuple

from smokebox.engine.files.descriptors import READ, check_regular, closing, open_beneath
from smokebox.engine.files.patterns import Segments, compile_pattern, match_names
from smokebox.engine.workers import checkpoint
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = ".gitignore"
# Bounds on what a hostile sandbox can make the engine do.
MAX_FILE = 256 << 10
MAX_RULES = 2_000
MAX_RULE = 1_000
MAX_WILDCARDS = 20
_MAX_CACHED = 1_000
_TRAILING_BACKSLASH = re.compile(r"(?<!\\)(\\\\)*\\$")


class IgnoreRule(NamedTuple):
    """One line: its pattern, whether it includes again, and whether it is for directories only."""

    segments: Segments
    included: bool
    directories_only: bool


class IgnoreRules:
    """Decides which paths below an open directory are ignored. Call it in the order of a walk."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._rules: dict[str, list[IgnoreRule]] = {}

    def __call__(self, path: str) -> bool:
        """Return whether the nearest matching rule ignores a path."""
        folder = posixpath.dirname(path)
        is_directory: bool | None = None
        while True:
            names = path[len(folder) :].strip("/").split("/")
            checkpoint()
            for rule in reversed(self._rules_of(folder)):
                if not match_names(rule.segments, names):
                    continue
                if rule.directories_only and is_directory is None:
                    is_directory = self._is_directory(path)
                if not rule.directories_only or is_directory:
                    return not rule.included
            if not folder:
                return False
            folder = posixpath.dirname(folder)

    def _rules_of(self, folder: str) -> list[IgnoreRule]:
        rules = self._rules.get(folder)
        if rules is None:
            if len(self._rules) >= _MAX_CACHED:
                self._rules.clear()
            rules = self._rules[folder] = list(self._read(folder))
        return rules

    def _read(self, folder: str) -> Iterator[IgnoreRule]:
        path = posixpath.join(folder, FILE)
        data = b""
        with (
            contextlib.suppress(OSError, SmokeboxError),
            closing(open_beneath(self._top, path, READ)) as fd,
        ):
            check_regular(fd, path)
            data = os.read(fd, MAX_FILE)
        for line in data.decode("utf-8", "surrogateescape").split("\n")[:MAX_RULES]:
            checkpoint()
            rule = parse(line)
            if rule is not None:
                yield rule

    def _is_directory(self, path: str) -> bool:
        try:
            os.close(open_beneath(self._top, path, os.O_PATH | os.O_DIRECTORY))
        except OSError:
            return False
        return True


def parse(line: str) -> IgnoreRule | None:
    """Parse a line of a .gitignore file; None for a comment, an empty or an invalid line."""
    line = line.rstrip("\r")
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#") or len(line) > MAX_RULE or "\0" in line:
        return None
    if sum(map(line.count, "*?[")) > MAX_WILDCARDS:
        return None
    included = line.startswith("!")
    line = line[1:] if included else line
    directories_only = line.endswith("/")
    line = line.rstrip("/")
    # A trailing backslash matches nothing.
    if not line or _TRAILING_BACKSLASH.search(line):
        return None
    return IgnoreRule(compile_pattern(_unescape(line)), included, directories_only)


def _unescape(line: str) -> str:
    """Translate `\\x` for fnmatch: a wildcard becomes a class of one character."""
    out, characters = [], iter(line)
    for character in characters:
        if character == "\\":
            escaped = next(characters, "")
            out.append(f"[{escaped}]" if escaped in "*?[" and escaped else escaped)
        else:
            out.append(character)
    return "".join(out)
