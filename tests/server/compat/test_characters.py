"""Pieces of output that end at a character boundary."""

from __future__ import annotations

import pytest

from smokebox.server.compat.bridge.exec import CharacterBuffer

TEXT = "aä€😀\N{COMBINING ACUTE ACCENT}z"


@pytest.mark.parametrize("size", range(1, 8))
def test_pieces_never_split_a_character(size: int) -> None:
    data, buffer = TEXT.encode(), CharacterBuffer()
    pieces = [buffer.feed(data[at : at + size]) for at in range(0, len(data), size)]
    assert "".join(piece.decode() for piece in pieces) == TEXT
    assert buffer.finish() == b""


@pytest.mark.parametrize(
    "data", [b"\xff", b"\xe2\x28\xa1", b"a\x80\x80\x80\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8"]
)
def test_invalid_utf8_is_not_held_back(data: bytes) -> None:
    buffer = CharacterBuffer()
    assert buffer.feed(data) + buffer.finish() == data
    assert CharacterBuffer().feed(data + b"end") == data + b"end"


def test_incomplete_character_is_returned_at_the_end() -> None:
    buffer = CharacterBuffer()
    assert (buffer.feed(b"a\xf0\x9f\x98"), buffer.finish()) == (b"a", b"\xf0\x9f\x98")
    assert buffer.finish() == b""
