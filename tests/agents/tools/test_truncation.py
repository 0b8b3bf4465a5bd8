"""Cuts are made in bytes, and never inside a character."""

from __future__ import annotations

import pytest

from smokebox.agents.tools.output import (
    MAX_BYTES,
    fitting,
    fitting_lines,
    head,
    one_line,
    shell_word,
    shorten_line,
    tail,
)

MIXED = "aé€😀" * 5


@pytest.mark.parametrize("limit", range(len(MIXED.encode()) + 2))
def test_both_ends_are_whole_characters_within_the_limit(limit: int) -> None:
    data = MIXED.encode()
    for part in (head(data, limit), tail(data, limit)):
        assert part.decode() in MIXED
        assert limit - 3 <= len(part) <= limit or part == data


def test_what_is_not_utf8_is_cut_near_the_limit() -> None:
    assert len(head(b"\x80" * 100, 50)) >= 47
    assert len(tail(b"\x80" * 100, 50)) >= 47


def test_a_line_is_cut_in_bytes() -> None:
    assert shorten_line("é" * 250) == "é" * 250
    assert shorten_line("é" * 251) == "é" * 250 + "..."
    assert shorten_line("a" + "é" * 250) == "a" + "é" * 249 + "..."


def test_line_breaks_count_towards_what_fits() -> None:
    half = MAX_BYTES // 2
    assert fitting([half, half], 10) == 1
    assert fitting([half, half - 1], 10) == 2
    assert fitting([1] * 5, 3) == 3
    assert fitting([MAX_BYTES + 1], 3) == 0
    assert fitting_lines(["é" * (half // 2)] * 2, 10) == 1


def test_a_name_that_would_break_the_line_is_quoted() -> None:
    assert one_line("it's ünï.txt") == "it's ünï.txt"
    assert one_line("a\nb") == '"a\\nb"'


def test_a_proposed_command_takes_any_name() -> None:
    assert shell_word("a b") == "'a b'"
    assert shell_word("-n") == "./-n"
