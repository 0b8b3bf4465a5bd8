"""Pieces of output that end where a character does."""

from __future__ import annotations

import pytest

from smokebox.server.compat.bridge.exec import WholeCharacters

TEXT = "aä€😀\N{COMBINING ACUTE ACCENT}z"


@pytest.mark.parametrize("size", range(1, 8))
def test_text_cut_anywhere_comes_in_pieces_of_text(size: int) -> None:
    data, whole = TEXT.encode(), WholeCharacters()
    pieces = [whole.feed(data[at : at + size]) for at in range(0, len(data), size)]
    assert "".join(piece.decode() for piece in pieces) == TEXT
    assert whole.finish() == b""


@pytest.mark.parametrize(
    "data", [b"\xff", b"\xe2\x28\xa1", b"a\x80\x80\x80\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8"]
)
def test_what_is_no_text_is_not_held_back(data: bytes) -> None:
    whole = WholeCharacters()
    assert whole.feed(data) + whole.finish() == data
    assert WholeCharacters().feed(data + b"end") == data + b"end"


def test_a_character_that_nobody_finishes_comes_at_the_end() -> None:
    whole = WholeCharacters()
    assert (whole.feed(b"a\xf0\x9f\x98"), whole.finish()) == (b"a", b"\xf0\x9f\x98")
    assert whole.finish() == b""
