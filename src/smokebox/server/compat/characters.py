"""Bytes in pieces that end where a character does."""

from __future__ import annotations

import codecs

_decoder = codecs.getincrementaldecoder("utf-8")
# A character has four bytes at most, so of one that is cut there are three.
_LONGEST_CUT = 3


class WholeCharacters:
    """Holds back a character that is not there whole; what is not UTF-8 passes as it is."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What was held back and `data`, up to the last character that is whole."""
        data = self._held + data
        decoder = _decoder("replace")
        decoder.decode(data[-_LONGEST_CUT:])
        cut = len(data) - len(decoder.getstate()[0])
        self._held = data[cut:]
        return data[:cut]

    def finish(self) -> bytes:
        """What is left: the beginning of a character that nobody finished."""
        held, self._held = self._held, b""
        return held
