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
        self._rest = b""
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[Event]:
        """Return the events completed by `data`.

        Raises:
            ValueError: An event is longer than `LONGEST_EVENT`.
        """
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
