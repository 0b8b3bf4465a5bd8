"""The last output of a terminal, in a bounded place, by its position in all output."""

from __future__ import annotations


class Replay:
    """A ring of bytes: what is added last pushes out what was added first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._data = bytearray()
        self.end = 0

    @property
    def start(self) -> int:
        """The position of the oldest byte that is still here."""
        return self.end - len(self._data)

    def add(self, data: bytes) -> None:
        """Put bytes at the end."""
        rest = memoryview(data)
        while rest:
            place = self.end % self._size
            piece = rest[: self._size - place]
            # Until the ring is full, its end is that of the array, which grows.
            self._data[place : place + len(piece)] = piece
            self.end += len(piece)
            rest = rest[len(piece) :]

    def read(self, position: int, most: int) -> bytes:
        """Up to `most` bytes from a position that is not before `start`."""
        count = min(most, self.end - position)
        place = position % self._size
        found = bytes(self._data[place : place + count])
        return found + bytes(self._data[: count - len(found)])
