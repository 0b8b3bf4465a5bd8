"""Server-sent events (text/event-stream): encoding, heartbeats and a reader."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

MEDIA = "text/event-stream"
# A comment, which readers ignore. It shows that the connection lives.
HEARTBEAT = b":\n\n"
LONGEST_EVENT = 64 << 20


class Event(NamedTuple):
    """One event: its name, its data, and the cursor to resume after it, if it has one."""

    name: str
    data: bytes
    id: str | None = None


def encode(name: str, data: bytes, id: str | None = None) -> bytes:
    """Encode an event. `data` must not contain line breaks; JSON and base64 have none."""
    cursor = b"" if id is None else b"id: %s\n" % id.encode()
    return b"event: %s\n%sdata: %s\n\n" % (name.encode(), cursor, data)


async def with_heartbeat(
    source: AsyncGenerator[bytes, None], seconds: float
) -> AsyncGenerator[bytes, None]:
    """Yield the events of `source`, and a heartbeat whenever it is silent for `seconds`.

    Closes the source at the end. Its exceptions are raised here.
    """
    pending: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(source, None))
            done, _ = await asyncio.wait((pending,), timeout=seconds)
            if not done:
                yield HEARTBEAT
                continue
            event, pending = pending.result(), None
            if event is None:
                return
            yield event
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pending
        await source.aclose()


class EventReader:
    """Parser of an event stream that arrives in chunks."""

    def __init__(self) -> None:
        self._start()
        # Pieces of a line whose end has not arrived.
        self._line: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        """Return the events completed by `data`.

        Raises:
            ValueError: An event is longer than `LONGEST_EVENT`.
        """
        events = []
        start = 0
        # A search for one byte takes a hundredth of the time of one for the empty line.
        while (end := data.find(b"\n", start)) >= 0:
            line = data[start:end]
            self._size += len(line)
            start = end + 1
            if self._line:
                line = b"".join([*self._line, line])
                self._line.clear()
            if line:
                self._add(line)
                continue
            if self._data:
                events.append(Event(self._name, b"\n".join(self._data), self._id))
            self._start()
        if start < len(data):
            self._line.append(data[start:])
            self._size += len(data) - start
        if self._size > LONGEST_EVENT:
            raise ValueError(f"an event of more than {LONGEST_EVENT} bytes")
        return events

    def _start(self) -> None:
        self._name, self._size = "message", 0
        self._id: str | None = None
        self._data: list[bytes] = []

    def _add(self, line: bytes) -> None:
        # The usual form first, as its value may be large.
        if line.startswith(b"data: "):
            self._data.append(line[6:])
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._name = value.decode()
        elif field == b"data":
            self._data.append(value)
        elif field == b"id":
            self._id = value.decode()
