"""Ids of the protocol, and what the engine calls the same."""

from __future__ import annotations

import re

import pytest

from smokebox.engine.names import RESERVED, check_id, check_session_name
from smokebox.server.compat.bridge.errors import BridgeError
from smokebox.server.compat.bridge.names import ID, check_session, engine_id, new_id, session_name

LONGEST = "a" * 128


def test_a_new_id_is_26_letters_and_digits_and_another_each_time() -> None:
    made = {new_id() for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch("[a-z2-7]{26}", id) for id in made)


@pytest.mark.parametrize("prefix", ["", "team-a-", "x" * 47])
def test_every_id_has_one_that_the_engine_takes(prefix: str) -> None:
    for id in ("a", "7", new_id(), "b" * 63, "b" * 64, LONGEST, *RESERVED):
        assert ID.fullmatch(id)
        found = engine_id(id, prefix)
        assert check_id(found) == found
        assert found.startswith(prefix)
        assert engine_id(id, prefix) == found


def test_a_short_id_is_the_same_in_the_native_api() -> None:
    assert engine_id("user42", "") == "user42"
    assert engine_id("b" * 63, "") == "b" * 63


def test_no_two_ids_meet() -> None:
    ids = ["b" * length for length in range(1, 129)] + sorted(RESERVED)
    assert len({engine_id(id, "") for id in ids}) == len(ids)


@pytest.mark.parametrize("id", ["s", "-s", ".s", "a.b-c_d", "-" * 128, LONGEST])
def test_every_session_has_a_name_that_the_engine_takes(id: str) -> None:
    assert check_session(id) == id
    assert check_session_name(session_name(id)) == session_name(id)


@pytest.mark.parametrize("id", ["", "a b", "a..b", "a/b", "ä", "a" * 129, "a\n"])
def test_what_cannot_be_a_session_is_refused(id: str) -> None:
    with pytest.raises(BridgeError, match="Invalid session ID format"):
        check_session(id)
