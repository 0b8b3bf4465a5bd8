"""Bodies that a server compressed though it was asked not to."""

from __future__ import annotations

import zlib

from smokebox.engine.egress.http.pool import Unanswered

# A small piece may hold a thousand times as much; what is passed on at once stays bounded.
_MOST_AT_ONCE = 16 * 1024 * 1024
_EITHER = zlib.MAX_WBITS | 32


class Unpacker:
    """Takes gzip and zlib apart, piece by piece."""

    def __init__(self, coding: str) -> None:
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise Unanswered(
                f"the answer is compressed with {coding!r:.40}, which cannot be searched for "
                "secrets; scrub=False would let it through"
            )
        self._opener = zlib.decompressobj(_EITHER)

    def feed(self, piece: bytes) -> bytes:
        """What a piece of the body holds. Raises `Unanswered`."""
        opened: list[bytes] = []
        left = _MOST_AT_ONCE
        try:
            while piece:
                opened.append(self._opener.decompress(piece, left))
                left -= len(opened[-1])
                if left <= 0:
                    raise Unanswered("the answer is compressed beyond measure")
                piece = self._opener.unused_data
                if self._opener.eof and piece:
                    self._opener = zlib.decompressobj(_EITHER)
        except zlib.error:
            raise Unanswered("the answer is not compressed as it says") from None
        return b"".join(opened)
