"""Directories out of a long listing of keys."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from smokebox.sandbox.filesystems.objects import DIRECTORY, Found, add

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.sandbox.filesystems.objects import Walked


def directories(
    walked: Walked, top: str, marker: str, after: str = ""
) -> dict[str, dict[str, Found]]:
    """What is in `top` and in each directory below it of which everything was seen.

    A listing of keys does not tell an empty file from the marker of an empty directory, so
    a directory that holds one is left out, as are those that the key before the first, or
    the last one, may have cut.
    """
    made: dict[str, dict[str, Found]] = {top: {}}
    empty: list[str] = []
    for key, found in walked.found:
        path = "/" + key
        if path == top:
            continue
        above, _, name = path.rpartition("/")
        inside = made.get(above or "/")
        if inside is None:
            inside = _add_above(made, above, top)
        if name == marker:
            continue
        add(inside, name, found)
        if not found.entry.size:
            empty.append(path)
    for path in empty:
        above, name = posixpath.split(path)
        if above in made and not made[above][name].is_directory:
            del made[above]
    cuts = [after] if walked.ended or not walked.found else [after, walked.found[-1][0]]
    for key in filter(None, cuts):
        for above in _upward(posixpath.dirname("/" + key), top):
            made.pop(above, None)
    return made


def resume_after(walked: Walked, top: str, after: str) -> str:
    """The key to go on after: before the directory that was cut, so that it is seen whole.

    One that is longer than a whole walk is passed by.
    """
    if not walked.found:
        return after
    last = walked.found[-1][0]
    start = len(top.strip("/")) + 1 if top != "/" else 0
    cut = last[:start] + last[start:].partition("/")[0]
    return cut if cut > after else last


def _add_above(made: dict[str, dict[str, Found]], directory: str, top: str) -> dict[str, Found]:
    """Add a directory, and those above it that are not there; what is in it so far."""
    for path in _upward(directory, top):
        if path in made:
            break
        made[path] = {}
    for path in _upward(directory, top):
        if path == top:
            break
        above, name = posixpath.split(path)
        _add_directory(made[above], name)
    return made[directory]


def _add_directory(found: dict[str, Found], name: str) -> None:
    # A file of the same name hides the directory, unless it is empty and stands for it.
    if name not in found or not found[name].entry.size:
        found[name] = DIRECTORY


def _upward(path: str, top: str) -> Iterator[str]:
    """`path` and the directories above it, up to and with `top`."""
    yield path
    while path not in (top, "/"):
        path = path.rpartition("/")[0] or "/"
        yield path
