"""Unknown options and invalid values."""

from __future__ import annotations

from typing import Any

import pytest

from smokebox.errors import InvalidOption
from smokebox.options import check_env, check_timeout, refuse_unknown, strict_options


@strict_options()
def create(name: str = "", *, network: bool = False, read_only: bool = False) -> str:
    return f"{name} {network} {read_only}"


def test_unknown_option_suggests_the_nearest() -> None:
    options: Any = {"readonly": True}
    with pytest.raises(InvalidOption) as caught:
        create(**options)
    assert str(caught.value) == "create() has no option 'readonly'. Did you mean 'read_only'?"


def test_unknown_option_without_a_near_name_lists_all() -> None:
    with pytest.raises(InvalidOption) as caught:
        refuse_unknown("create()", ["zzz"], ["b", "a"])
    assert caught.value.hint == "It takes: a, b."


def test_known_options_pass() -> None:
    assert create("x", network=True) == "x True False"


@pytest.mark.parametrize("env", [{"1A": "x"}, {"A B": "x"}, {"": "x"}, {"A": "\0"}, {"A": 1}, []])
def test_invalid_environments_are_refused(env: Any) -> None:
    with pytest.raises(InvalidOption):
        check_env(env)


def test_environment_is_copied() -> None:
    env = {"A": "b"}
    copy = check_env(env)
    env["A"] = "changed"
    assert copy == {"A": "b"}
    assert check_env(None) == {}


@pytest.mark.parametrize("timeout", [0, -1, True, "3", float("inf"), float("nan")])
def test_invalid_timeouts_are_refused(timeout: Any) -> None:
    with pytest.raises(InvalidOption):
        check_timeout(timeout)


def test_valid_timeouts_are_accepted() -> None:
    assert check_timeout(None) is None
    assert check_timeout(3) == 3.0
