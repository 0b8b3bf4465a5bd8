"""Who a command runs as, by the passwd and group files of an image or a sandbox.

Both files are written by whoever is inside. A line that makes no sense is not there, and
only so much of either is read.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import InvalidOption, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_FILE = 64 << 10
LONGEST_LINE = 4096
MOST_GROUPS = 256
SHOWN = 12
# setuid(-1) means "leave it as it is": a user of that number would stay root.
HIGHEST_ID = 2**32 - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody a command can run as. `groups` are the further ones, without `gid`."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    home: str = "/"
    shell: str = "/bin/sh"


def lookup(user: str, passwd: bytes, group: bytes) -> User:
    """The user that `name`, `uid`, `name:group` or `uid:gid` stands for.

    A number needs no line in the file: without one its group is 0 and its home is `/`, as in
    containers. A name does, and raises `NotFound` otherwise. With a group given, that is the
    only one.
    """
    who, colon, their_group = user.partition(":")
    found = _user(who, passwd)
    if colon:
        gid = _gid(their_group, group)
        return User(name=found.name, uid=found.uid, gid=gid, home=found.home, shell=found.shell)
    return User(
        name=found.name,
        uid=found.uid,
        gid=found.gid,
        groups=_memberships(found, group),
        home=found.home,
        shell=found.shell,
    )


def _user(who: str, passwd: bytes) -> User:
    known = list(_users(passwd))
    for user in known:
        if user.name == who:
            return user
    uid = _asked_id(who, "user")
    if uid is None:
        raise _unknown("user", who, [user.name for user in known])
    for user in known:
        if user.uid == uid:
            return user
    return User(name=who, uid=uid, gid=0)


def _gid(name: str, group: bytes) -> int:
    known = {fields[0]: gid for fields, gid in _groups(group)}
    if name in known:
        return known[name]
    gid = _asked_id(name, "group")
    if gid is None:
        raise _unknown("group", name, list(known))
    return gid


def _memberships(user: User, group: bytes) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for fields, gid in _groups(group):
        if gid != user.gid and user.name in fields[3].split(","):
            found[gid] = None
        if len(found) == MOST_GROUPS:
            break
    return tuple(found)


def _users(passwd: bytes) -> Iterator[User]:
    for fields in _lines(passwd, 7):
        uid, gid = _id(fields[2]), _id(fields[3])
        if uid is not None and gid is not None:
            home, shell = _path(fields[5], "/"), _path(fields[6], "/bin/sh")
            yield User(name=fields[0], uid=uid, gid=gid, home=home, shell=shell)


def _groups(group: bytes) -> Iterator[tuple[list[str], int]]:
    for fields in _lines(group, 4):
        gid = _id(fields[2])
        if gid is not None:
            yield fields, gid


def _lines(data: bytes, width: int) -> Iterator[list[str]]:
    """The fields of each line that has that many and a printable name."""
    for line in data[:LONGEST_FILE].split(b"\n"):
        if line.count(b":") != width - 1 or len(line) > LONGEST_LINE or b"\0" in line:
            continue
        fields = line.decode(errors="replace").split(":")
        name = fields[0]
        if name and name.isprintable() and name[0] not in "+-#":
            yield fields


def _id(text: str) -> int | None:
    """The id that ASCII digits spell; int() takes more than the C library does."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    number = int(text)
    return number if number <= HIGHEST_ID else None


def _asked_id(text: str, kind: str) -> int | None:
    number = _id(text)
    if number is None and text.isascii() and text.isdigit():
        raise InvalidOption(
            f"{text} is not a {kind} id.",
            hint=f"Ids go from 0 to {HIGHEST_ID}.",
            option="user",
            value=text,
        )
    return number


def _path(text: str, otherwise: str) -> str:
    return text if text.startswith("/") and text.isprintable() else otherwise


def _unknown(kind: str, name: str, known: list[str]) -> NotFound:
    near = difflib.get_close_matches(name[:64], known[:1000], n=1, cutoff=0.6)
    ellipsis = ", ..." if len(known) > SHOWN else ""
    names = ", ".join(known[:SHOWN]) + ellipsis if known else "none"
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return NotFound(
        f"no {kind} {name!r} in the sandbox.",
        hint=f"{hint}It has: {names}. A number works too.",
        kind=kind,
        name=name,
    )
