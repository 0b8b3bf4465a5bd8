"""Server-sent events, as text/event-stream has them: written by the server, read by clients."""

from __future__ import annotations

from typing import NamedTuple

MEDIA = "text/event-stream"
# A comment, which readers ignore: the connection lives.
HEARTBEAT = b":\n\n"
LONGEST_EVENT = 64 << 20


class Event(NamedTuple):
    """One event: its name, its data, and the cursor after it, if it has one."""

    name: str
    data: bytes
    id: str | None = None


def encode(name: str, data: bytes, id: str | None = None) -> bytes:
    """An event whose data has no line breaks, as JSON and base64 have none."""
    cursor = b"" if id is None else b"id: %s\n" % id.encode()
    return b"event: %s\n%sdata: %s\n\n" % (name.encode(), cursor, data)


class Reader:
    """Takes bytes as they come, and gives the events that are whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[Event]:
        """The events that end in `data`. Raises ValueError for one without end."""
        self._pieces.append(data)
        self._size += len(data)
        if b"\n\n" not in data and not (data.startswith(b"\n") and self._rest.endswith(b"\n")):
            self._rest = data or self._rest
            if self._size > LONGEST_EVENT:
                raise ValueError(f"an event of more than {LONGEST_EVENT} bytes")
            return []
        *blocks, rest = b"".join(self._pieces).split(b"\n\n")
        self._pieces, self._size, self._rest = [rest], len(rest), rest
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    name, id, data = "message", None, []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            data.append(value)
        elif field == b"id":
            id = value.decode()
    return Event(name, b"\n".join(data), id) if data else None
