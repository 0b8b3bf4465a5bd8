"""Ids of the bridge protocol, and their ids in the engine."""

from __future__ import annotations

import re

import pytest

from smokebox.engine.names import RESERVED, check_id, check_session_name
from smokebox.server.compat.bridge.errors import BridgeError
from smokebox.server.compat.bridge.names import (
    ID,
    check_session,
    engine_id,
    random_bridge_id,
    session_name,
)

LONGEST = "a" * 128


def test_random_ids_are_unique_and_have_26_characters() -> None:
    ids = {random_bridge_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[a-z2-7]{26}", id) for id in ids)


@pytest.mark.parametrize("prefix", ["", "team-a-", "x" * 47])
def test_every_id_maps_to_a_valid_engine_id(prefix: str) -> None:
    for id in ("a", "7", random_bridge_id(), "b" * 63, "b" * 64, LONGEST, *RESERVED):
        assert ID.fullmatch(id)
        found = engine_id(id, prefix)
        assert check_id(found) == found
        assert found.startswith(prefix)
        assert engine_id(id, prefix) == found


def test_short_ids_are_unchanged() -> None:
    assert engine_id("user42", "") == "user42"
    assert engine_id("b" * 63, "") == "b" * 63


def test_engine_ids_do_not_collide() -> None:
    ids = ["b" * length for length in range(1, 129)] + sorted(RESERVED)
    assert len({engine_id(id, "") for id in ids}) == len(ids)


@pytest.mark.parametrize("id", ["s", "-s", ".s", "a.b-c_d", "-" * 128, LONGEST])
def test_every_session_id_maps_to_a_valid_name(id: str) -> None:
    assert check_session(id) == id
    assert check_session_name(session_name(id)) == session_name(id)


@pytest.mark.parametrize("id", ["", "a b", "a..b", "a/b", "ä", "a" * 129, "a\n"])
def test_invalid_session_ids_are_refused(id: str) -> None:
    with pytest.raises(BridgeError, match="Invalid session ID format"):
        check_session(id)
