"""The audit log of one sandbox: its connections, requests and DNS queries, with their outcome."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from smokebox.types import NetworkEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from smokebox.types import NetworkVerdict


FILE = "egress.log"
"""Name of the file in the directory of a sandbox."""

MAX_IN_MEMORY = 512
# Bytes in each of two files.
MAX_FILE_SIZE = 4 << 20
MAX_PAGE = 1000
# A sandbox can send names and paths of any length.
_MAX_TEXT = 1024
# Bytes that are read when a sandbox wakes.
_TAIL = 64 * 1024

_log = logging.getLogger("smokebox.egress")
_FIELDS = [one.name for one in dataclasses.fields(NetworkEvent)]
# One encoder for all lines: `json.dumps` would build one for each, and `asdict` copy the values.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class AuditLog:
    """The latest events of one sandbox, in order, in memory and in a file.

    The file outlives the engine. `on_event` is called with each event.
    """

    def __init__(self, on_event: Callable[[NetworkEvent], None] | None = None) -> None:
        self._on_event = on_event
        self._recent: collections.deque[NetworkEvent] = collections.deque(maxlen=MAX_IN_MEMORY)
        self._path = ""
        self._file: int | None = None
        self._size = 0
        self._cursor = 0
        self._waiting: asyncio.Future[None] | None = None
        self._ended = False

    def open(self, path: str) -> None:
        """Use this file, and continue after the events in it."""
        if path == self._path:
            return
        self.close()
        self._path = path
        events = _read_tail(path) or _read_tail(_rotated(path))
        if events and events[-1].cursor > self._cursor:
            self._cursor = events[-1].cursor
            self._recent.clear()
            self._recent.extend(events)

    def add(
        self,
        *,
        verdict: NetworkVerdict,
        host: str,
        port: int,
        rule: str,
        protocol: Literal["http", "https", "tcp", "dns"] = "https",
        method: str | None = None,
        path: str | None = None,
        status: int | None = None,
        sent: int = 0,
        received: int = 0,
        seconds: float = 0.0,
        handler: str | None = None,
        reason: str = "",
    ) -> NetworkEvent:
        """Append an event that has ended."""
        self._cursor += 1
        event = NetworkEvent(
            cursor=self._cursor,
            at=time.time(),
            verdict=verdict,
            host=_shorten(host),
            port=port,
            rule=rule,
            protocol=protocol,
            method=None if method is None else _shorten(method),
            path=None if path is None else _shorten(path),
            status=status,
            sent=sent,
            received=received,
            seconds=round(seconds, 6),
            handler=handler,
            reason=_shorten(reason),
        )
        self._recent.append(event)
        self._write(event)
        if self._on_event is not None:
            self._on_event(event)
        self._wake()
        return event

    async def read(self, after: int = 0, limit: int = MAX_PAGE) -> list[NetworkEvent]:
        """Return the first events after a cursor, oldest first."""
        if self._cursor <= after:
            return []
        if not self._recent or self._recent[0].cursor > after + 1:
            found = await asyncio.to_thread(_read_after, self._path, after, limit)
            if found:
                return found
        return [event for event in self._recent if event.cursor > after][:limit]

    async def follow(self, after: int | None = None) -> AsyncIterator[NetworkEvent]:
        """Yield the events after a cursor, then each new one until the sandbox is destroyed.

        Without a cursor only new events.
        """
        cursor = self._cursor if after is None else after
        while True:
            while events := await self.read(cursor):
                for event in events:
                    cursor = event.cursor
                    yield event
            if self._ended:
                return
            if self._waiting is None or self._waiting.done():
                self._waiting = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiting)

    @property
    def cursor(self) -> int:
        """Cursor of the last event."""
        return self._cursor

    def close(self) -> None:
        """Close the file; the next event opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def end(self) -> None:
        """Close the log of a destroyed sandbox, and end its followers."""
        self._ended = True
        self.close()
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _write(self, event: NetworkEvent) -> None:
        if not self._path:
            return
        line = _encode({name: getattr(event, name) for name in _FIELDS}).encode() + b"\n"
        try:
            if self._file is None:
                self._file = self._open_file()
            self._size += os.write(self._file, line)
            if self._size > MAX_FILE_SIZE:
                self.close()
                os.replace(self._path, _rotated(self._path))
        except OSError as error:
            # A full disk costs a sandbox its audit log, not its network.
            self.close()
            _log.warning("the network log %s cannot be written: %s", self._path, error)

    def _open_file(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        self._size = os.fstat(file).st_size
        return file


def _rotated(path: str) -> str:
    return f"{path}.1"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


def _read_tail(path: str) -> list[NetworkEvent]:
    """Return the last events of a file, without truncated lines."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines()[-MAX_IN_MEMORY:]
    except OSError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _read_after(path: str, after: int, limit: int) -> list[NetworkEvent]:
    found: list[NetworkEvent] = []
    for one in (_rotated(path), path):
        with contextlib.suppress(OSError), open(one, "rb") as file:
            for line in file:
                event = _parse(line)
                if event is not None and event.cursor > after:
                    found.append(event)
                    if len(found) == limit:
                        return found
    return found


def _parse(line: bytes) -> NetworkEvent | None:
    try:
        data: dict[str, Any] = json.loads(line)
        return NetworkEvent(**{name: value for name, value in data.items() if name in _FIELDS})
    except (ValueError, TypeError, AttributeError):
        return None


class TrafficTotals:
    """Totals of all sandboxes: events by verdict, and bytes as the sandboxes saw them."""

    def __init__(self) -> None:
        self.events: Counter[NetworkVerdict] = Counter()
        self.sent = 0
        self.received = 0

    def count(self, event: NetworkEvent) -> None:
        """Count one event of an audit log."""
        self.events[event.verdict] += 1
        self.sent += event.sent
        self.received += event.received
