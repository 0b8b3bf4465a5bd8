"""What the .gitignore files in a tree leave out, read from outside without any git.

The rules are git's: the last pattern that fits decides, those of deeper files go before those
of higher ones, `!` takes back, and nothing is taken back in a directory that is left out. What
is tracked makes no difference here.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from typing import TYPE_CHECKING, NamedTuple

from smokebox.engine.files.descriptors import READ, check_regular, closing, open_beneath
from smokebox.engine.files.patterns import Segments, compiled, fits
from smokebox.engine.workers import checkpoint
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = ".gitignore"
# More of one file nobody has written, but a sandbox might, to be a nuisance.
LONGEST_FILE = 256 << 10
MOST_RULES = 2_000
LONGEST_RULE = 1_000
MOST_WILDCARDS = 20
_REMEMBERED = 1_000
_LONE = re.compile(r"(?<!\\)(\\\\)*\\$")


class IgnoreRule(NamedTuple):
    """One line: what it fits, whether that is taken back, and whether directories only."""

    segments: Segments
    kept: bool
    directories: bool


class IgnoreRules:
    """Whether a path below an open directory is left out. Paths are asked in order of a walk."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._rules: dict[str, list[IgnoreRule]] = {}

    def __call__(self, path: str) -> bool:
        """Whether the nearest rule that fits a path leaves it out."""
        folder = posixpath.dirname(path)
        is_directory: bool | None = None
        while True:
            names = path[len(folder) :].strip("/").split("/")
            checkpoint()
            for rule in reversed(self._of(folder)):
                if not fits(rule.segments, names):
                    continue
                if rule.directories and is_directory is None:
                    is_directory = self._is_directory(path)
                if not rule.directories or is_directory:
                    return not rule.kept
            if not folder:
                return False
            folder = posixpath.dirname(folder)

    def _of(self, folder: str) -> list[IgnoreRule]:
        rules = self._rules.get(folder)
        if rules is None:
            if len(self._rules) >= _REMEMBERED:
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
            data = os.read(fd, LONGEST_FILE)
        for line in data.decode("utf-8", "surrogateescape").split("\n")[:MOST_RULES]:
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
    """A line of a .gitignore file; None for a comment, an empty one, or nonsense."""
    line = line.rstrip("\r")
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#") or len(line) > LONGEST_RULE or "\0" in line:
        return None
    if sum(map(line.count, "*?[")) > MOST_WILDCARDS:
        return None
    kept = line.startswith("!")
    line = line[1:] if kept else line
    directories = line.endswith("/")
    line = line.rstrip("/")
    # A backslash before nothing fits nothing.
    if not line or _LONE.search(line):
        return None
    return IgnoreRule(compiled(_unescaped(line)), kept, directories)


def _unescaped(line: str) -> str:
    """`\\x` as git means it, in the words of fnmatch: a class with one character in it."""
    out, characters = [], iter(line)
    for one in characters:
        if one == "\\":
            escaped = next(characters, "")
            out.append(f"[{escaped}]" if escaped in "*?[" and escaped else escaped)
        else:
            out.append(one)
    return "".join(out)
