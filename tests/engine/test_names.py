"""Checks of names: valid ones, and errors for invalid ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.engine import names
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable

# Values that no check accepts.
INVALID = [
    None,
    True,
    1.5,
    b"box",
    ["box"],
    "",
    " ",
    "a b",
    "a\n",
    "\na",
    "a\0b",
    "..",
    "../x",
    "/x",
    "a/",
    "-a",
    "\u0661\u0662",  # Arabic digits
    "caf\u00e9",
    "\u0131d",  # its upper case is an ASCII letter
    "\ud800",
    "$(reboot)",
    "a" * 5000,
]

CHECKS: dict[str, Callable[[object], object]] = {
    "id": names.check_id,
    "session": names.check_session_name,
    "process_id": names.check_process_id,
    "port": names.check_port,
    "user": names.check_user,
    "labels": names.check_label,
}


@pytest.mark.parametrize("value", INVALID, ids=lambda value: ascii(value)[:20])
@pytest.mark.parametrize("option", CHECKS)
def test_invalid_names_are_refused_with_option_value_and_hint(option: str, value: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        CHECKS[option](value)
    assert caught.value.fields == {"option": option, "value": value}
    assert caught.value.hint
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


@pytest.mark.parametrize("id", ["a", "7", "user-42", "a--b", "0-0", "a" * 63])
def test_dns_labels_are_valid_ids(id: str) -> None:
    assert names.check_id(id) == id


@pytest.mark.parametrize("id", ["a" * 64, "a-", "a_b", "a.b", "a:b", "xn--80ak6aa92e", "A" * 64])
def test_ids_that_are_not_plain_dns_labels_are_refused(id: str) -> None:
    with pytest.raises(InvalidOption):
        names.check_id(id)


def test_uppercase_id_gets_the_lowercase_form_as_hint() -> None:
    with pytest.raises(InvalidOption, match="use 'user-42'"):
        names.check_id("User-42")


@pytest.mark.parametrize("id", ["User_42", "WWW"])
def test_hint_never_suggests_an_invalid_id(id: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        names.check_id(id)
    assert id.lower() not in caught.value.hint


@pytest.mark.parametrize("id", ["www", "api", "admin", "root", "system", "localhost", "smokebox"])
def test_reserved_id_is_refused_with_a_free_one(id: str) -> None:
    with pytest.raises(InvalidOption, match="reserved") as caught:
        names.check_id(id)
    assert names.check_id(f"my-{id}") in caught.value.hint


@pytest.mark.parametrize("name", ["default", "s1", "a@b.example", "2024-01-01T10:00", "_x"])
def test_session_names_and_process_ids_are_valid_file_names(name: str) -> None:
    assert names.check_session_name(name) == name
    assert names.check_process_id(name) == name


def test_longest_name_has_128_characters() -> None:
    assert names.check_session_name("a" * 128)
    with pytest.raises(InvalidOption):
        names.check_session_name("a" * 129)


@pytest.mark.parametrize("port", [0, -1, 65536, 80.0, "80", 1 << 70])
def test_ports_outside_of_1_to_65535_are_refused(port: object) -> None:
    assert (names.check_port(1), names.check_port(65535)) == (1, 65535)
    with pytest.raises(InvalidOption, match="1 to 65535"):
        names.check_port(port)


@pytest.mark.parametrize("user", ["root", "www-data", "_apt", "a.b", "host$", "0", "4294967294"])
def test_user_is_a_name_or_a_uid(user: str) -> None:
    assert names.check_user(user) == user


@pytest.mark.parametrize("user", ["4294967295", "007", "1000:1000", "1a", "a" * 33, "a:b"])
def test_invalid_users_are_refused(user: str) -> None:
    with pytest.raises(InvalidOption):
        names.check_user(user)


def test_uid_as_a_number_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidOption, match="user='1000'"):
        names.check_user(1000)


def test_labels_are_copied() -> None:
    labels = {"team": "red", "example.org/owner": "Zo\u00eb"}
    checked = names.check_labels(labels)
    assert checked == labels
    assert checked is not labels
    assert names.check_labels(None) == {}


@pytest.mark.parametrize(
    "labels",
    [
        [("a", "b")],
        "a=b",
        {"a": 1},
        {1: "a"},
        {"a": "x\ny"},
        {"a": "x" * 256},
        {"a" * 64: "x"},
        {"": "x"},
        {"a": "\ud800"},
        {f"k{n}": "v" for n in range(65)},
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_invalid_labels_are_refused(labels: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        names.check_labels(labels)
    assert caught.value.fields["option"] == "labels"
    assert caught.value.hint


def test_random_ids_are_valid_and_unique() -> None:
    ids = {names.random_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(names.check_id(id) for id in ids)
