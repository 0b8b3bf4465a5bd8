"""Lookup of users in untrusted passwd and group files."""

from __future__ import annotations

import os
import random

import pytest

from smokebox.engine.images.etc_files import read_etc_file
from smokebox.engine.images.users import MAX_FILE, MAX_GROUPS, ImageUser, lookup
from smokebox.errors import InvalidOption, NotFound

FILES = (read_etc_file("passwd"), read_etc_file("group"))


def test_name_gives_ids_home_and_shell() -> None:
    assert lookup("user", *FILES) == ImageUser(
        name="user", uid=1000, gid=1000, home="/home/user", shell="/bin/bash"
    )
    assert lookup("root", *FILES).home == "/root"
    assert lookup("nobody", *FILES).uid == 65534


def test_supplementary_groups() -> None:
    group = b"users:x:100:alice,user\nuser:x:1000:user\nsudo:x:27:superuser\nkvm:x:105:user\n"
    assert lookup("user", FILES[0], group).groups == (100, 105)


def test_number_of_a_known_user() -> None:
    assert lookup("1000", *FILES) == lookup("user", *FILES)


def test_number_of_an_unknown_user() -> None:
    assert lookup("4321", *FILES) == ImageUser(
        name="4321", uid=4321, gid=0, home="/", shell="/bin/sh"
    )


@pytest.mark.parametrize(
    ("user", "ids"),
    [("1:2", (1, 2)), ("user:staff", (1000, 50)), ("user:7", (1000, 7)), ("0:0", (0, 0))],
)
def test_explicit_group(user: str, ids: tuple[int, int]) -> None:
    found = lookup(user, *FILES)
    assert (found.uid, found.gid, found.groups) == (*ids, ())


def test_unknown_user_lists_known_ones() -> None:
    with pytest.raises(NotFound, match=r"no user 'usr'.*'user'.*root, daemon") as caught:
        lookup("usr", *FILES)
    assert caught.value.fields == {"kind": "user", "name": "usr"}


def test_unknown_group() -> None:
    with pytest.raises(NotFound, match="no group 'stuff'") as caught:
        lookup("user:stuff", *FILES)
    assert caught.value.fields["kind"] == "group"


@pytest.mark.parametrize("user", ["", ":", "user:", "-1", "+1", " 1", "1_0", "١", "a\nb"])  # noqa: RUF001
def test_invalid_user_is_not_found(user: str) -> None:
    with pytest.raises(NotFound):
        lookup(user, *FILES)


@pytest.mark.parametrize("number", ["4294967295", "4294967296", "9" * 5000])
def test_ids_above_the_maximum_are_refused(number: str) -> None:
    with pytest.raises(InvalidOption, match="Ids go from 0"):
        lookup(number, *FILES)
    with pytest.raises(InvalidOption):
        lookup(f"user:{number}", *FILES)


@pytest.mark.parametrize(
    "line",
    [
        b"evil:x:-1:0::/:/bin/sh",
        b"evil:x:4294967295:0::/:/bin/sh",
        b"evil:x:1:99999999999::/:/bin/sh",
        b"evil:x: 1:1::/:/bin/sh",
        b"evil:x:1:1::/",
        b"evil:x:1:1::/:/bin/sh:more",
        b"evil:x:1:1::/\0:/bin/sh",
        b"evil" + b"l" * 5000 + b":x:1:1::/:/bin/sh",
        b"#evil:x:1:1::/:/bin/sh",
    ],
)
def test_invalid_lines_are_ignored(line: bytes) -> None:
    passwd = line + b"\nuser:x:1000:1000::/home/user:/bin/bash\n"
    assert lookup("user", passwd, b"").uid == 1000
    with pytest.raises(NotFound, match="It has: user"):
        lookup("evil", passwd, b"")


def test_invalid_home_and_shell_get_defaults() -> None:
    found = lookup("evil", b"evil:x:1:1::../..:-c\x1b[2J\n", b"")
    assert (found.home, found.shell) == ("/", "/bin/sh")


def test_first_line_of_a_name_wins() -> None:
    assert lookup("a", b"a:x:1:1::/:/a\na:x:0:0::/:/b\n", b"").uid == 1


def test_long_file_is_read_partly() -> None:
    passwd = b"\n" * MAX_FILE + b"late:x:1:1::/:/bin/sh\n"
    with pytest.raises(NotFound, match="It has: none"):
        lookup("late", passwd, b"")


def test_number_of_groups_is_limited() -> None:
    group = b"".join(b"g%d:x:%d:user\n" % (n, n) for n in range(2000, 9000))
    assert len(lookup("user", FILES[0], group).groups) == MAX_GROUPS


def test_random_files_raise_only_not_found() -> None:
    rng = random.Random(3)
    for _ in range(200):
        noise = bytes(rng.choices(b":\n0123456789ax,\xff\0/-", k=200)) + os.urandom(50)
        for user in ("a", "1", "a:1", "1:x"):
            try:
                found = lookup(user, noise, noise)
            except NotFound:
                continue
            assert 0 <= found.uid < 2**32 - 1
