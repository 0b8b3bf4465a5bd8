"""Lookup of users in the passwd and group files of a sandbox.

Both files are untrusted: invalid lines are ignored, and only a part of a large file is read.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.errors import InvalidOption, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FILE = 64 << 10
MAX_LINE = 4096
MAX_GROUPS = 256
MAX_SHOWN = 12
# setuid(-1) means "no change": a process of that user would stay root.
MAX_ID = 2**32 - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUser:
    """A user that a command can run as. `groups` are the supplementary ones, without `gid`."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    home: str = "/"
    shell: str = "/bin/sh"


def lookup(user: str, passwd: bytes, group: bytes) -> ImageUser:
    """Return the user for `name`, `uid`, `name:group` or `uid:gid`.

    A number needs no line in the file: without one its group is 0 and its home is `/`, as in
    containers. A name without a line raises `NotFound`. An explicit group is the only one.
    """
    name, colon, group_name = user.partition(":")
    found = _find_user(name, passwd)
    if colon:
        return replace(found, gid=_find_group(group_name, group))
    return replace(found, groups=_memberships(found, group))


def _find_user(name: str, passwd: bytes) -> ImageUser:
    known = list(_users(passwd))
    for user in known:
        if user.name == name:
            return user
    uid = _parse_option(name, "user")
    if uid is None:
        raise _unknown("user", name, [user.name for user in known])
    for user in known:
        if user.uid == uid:
            return user
    return ImageUser(name=name, uid=uid, gid=0)


def _find_group(name: str, group: bytes) -> int:
    known = {fields[0]: gid for fields, gid in _groups(group)}
    if name in known:
        return known[name]
    gid = _parse_option(name, "group")
    if gid is None:
        raise _unknown("group", name, list(known))
    return gid


def _memberships(user: ImageUser, group: bytes) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for fields, gid in _groups(group):
        if gid != user.gid and user.name in fields[3].split(","):
            found[gid] = None
        if len(found) == MAX_GROUPS:
            break
    return tuple(found)


def _users(passwd: bytes) -> Iterator[ImageUser]:
    for fields in _lines(passwd, 7):
        uid, gid = _parse_id(fields[2]), _parse_id(fields[3])
        if uid is not None and gid is not None:
            home, shell = _path(fields[5], "/"), _path(fields[6], "/bin/sh")
            yield ImageUser(name=fields[0], uid=uid, gid=gid, home=home, shell=shell)


def _groups(group: bytes) -> Iterator[tuple[list[str], int]]:
    for fields in _lines(group, 4):
        gid = _parse_id(fields[2])
        if gid is not None:
            yield fields, gid


def _lines(data: bytes, width: int) -> Iterator[list[str]]:
    """Yield the fields of each line with `width` of them and a printable name."""
    for line in data[:MAX_FILE].split(b"\n"):
        if line.count(b":") != width - 1 or len(line) > MAX_LINE or b"\0" in line:
            continue
        fields = line.decode(errors="replace").split(":")
        name = fields[0]
        if name and name.isprintable() and name[0] not in "+-#":
            yield fields


def _parse_id(text: str) -> int | None:
    """Parse ASCII digits; int() accepts more than the C library does."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    number = int(text)
    return number if number <= MAX_ID else None


def _parse_option(text: str, kind: str) -> int | None:
    number = _parse_id(text)
    if number is None and text.isascii() and text.isdigit():
        raise InvalidOption(
            f"{text} is not a {kind} id.",
            hint=f"Ids go from 0 to {MAX_ID}.",
            option="user",
            value=text,
        )
    return number


def _path(text: str, default: str) -> str:
    return text if text.startswith("/") and text.isprintable() else default


def _unknown(kind: str, name: str, known: list[str]) -> NotFound:
    near = difflib.get_close_matches(name[:64], known[:1000], n=1, cutoff=0.6)
    suggestion = f"Did you mean {near[0]!r}? " if near else ""
    names = ", ".join(known[:MAX_SHOWN]) or "none"
    ellipsis = ", ..." if len(known) > MAX_SHOWN else ""
    return NotFound(
        f"no {kind} {name!r} in the sandbox.",
        hint=f"{suggestion}It has: {names}{ellipsis}. A number works too.",
        kind=kind,
        name=name,
    )
