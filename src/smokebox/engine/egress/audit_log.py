"""The audit log of one sandbox: what it asked of the network, and what became of it."""

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
"""What it is called, next to what else a sandbox has on disk."""

# In memory, and on disk in each of two files.
MOST_IN_MEMORY = 512
MOST_IN_FILE = 4 << 20
MOST_AT_ONCE = 1000
# What a sandbox says may be of any length.
_LONGEST = 1024
# What is looked at when a sandbox wakes.
_TAIL = 64 * 1024

_log = logging.getLogger("smokebox.egress")
_KNOWN = [one.name for one in dataclasses.fields(NetworkEvent)]
# `json.dumps` would make one for each line, and `asdict` copy what cannot change.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class AuditLog:
    """What happened last, in order. It is kept in a file next to the sandbox's own, and goes on
    with it after a restart; the oldest is forgotten. `told` is told of each.
    """

    def __init__(self, told: Callable[[NetworkEvent], None] | None = None) -> None:
        self._told = told
        self._recent: collections.deque[NetworkEvent] = collections.deque(maxlen=MOST_IN_MEMORY)
        self._path = ""
        self._file: int | None = None
        self._size = 0
        self._cursor = 0
        self._waiting: asyncio.Future[None] | None = None
        self._over = False

    def place(self, path: str) -> None:
        """Say where it is kept."""
        if path == self._path:
            return
        self.close()
        self._path = path
        events = _read(path) or _read(_older(path))
        if events and events[-1].cursor > self._cursor:
            self._cursor = events[-1].cursor
            self._recent.clear()
            self._recent.extend(events)

    def note(
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
        """Write down one thing that has ended."""
        self._cursor += 1
        event = NetworkEvent(
            cursor=self._cursor,
            at=time.time(),
            verdict=verdict,
            host=_short(host),
            port=port,
            rule=rule,
            protocol=protocol,
            method=None if method is None else _short(method),
            path=None if path is None else _short(path),
            status=status,
            sent=sent,
            received=received,
            seconds=round(seconds, 6),
            handler=handler,
            reason=_short(reason),
        )
        self._recent.append(event)
        self._write(event)
        if self._told is not None:
            self._told(event)
        self._wake()
        return event

    async def read(self, after: int = 0, limit: int = MOST_AT_ONCE) -> list[NetworkEvent]:
        """The first of what came after a cursor, oldest first."""
        if self._cursor <= after:
            return []
        if not self._recent or self._recent[0].cursor > after + 1:
            found = await asyncio.to_thread(_read_after, self._path, after, limit)
            if found:
                return found
        return [event for event in self._recent if event.cursor > after][:limit]

    async def follow(self, after: int | None = None) -> AsyncIterator[NetworkEvent]:
        """What came after a cursor, and then all that comes; by default only that.

        Ends with the sandbox.
        """
        cursor = self._cursor if after is None else after
        while True:
            while events := await self.read(cursor):
                for event in events:
                    cursor = event.cursor
                    yield event
            if self._over:
                return
            if self._waiting is None or self._waiting.done():
                self._waiting = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiting)

    @property
    def cursor(self) -> int:
        """That of the last."""
        return self._cursor

    def close(self) -> None:
        """Let go of the file; it is opened again when there is something to write."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def end(self) -> None:
        """The sandbox was destroyed: nothing more will come."""
        self._over = True
        self.close()
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _write(self, event: NetworkEvent) -> None:
        if not self._path:
            return
        line = _encode({name: getattr(event, name) for name in _KNOWN}).encode() + b"\n"
        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            self._size += os.write(self._file, line)
            if self._size > MOST_IN_FILE:
                self.close()
                os.replace(self._path, _older(self._path))
        except OSError as error:
            # A full disk takes the audit of one sandbox, and not its network.
            self.close()
            _log.warning("the network log %s cannot be written: %s", self._path, error)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._file).st_size


def _older(path: str) -> str:
    return f"{path}.1"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _read(path: str) -> list[NetworkEvent]:
    """The last that are in a file; a line that was cut is left out."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines()[-MOST_IN_MEMORY:]
    except OSError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _read_after(path: str, after: int, limit: int) -> list[NetworkEvent]:
    found: list[NetworkEvent] = []
    for one in (_older(path), path):
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
        return NetworkEvent(**{name: value for name, value in data.items() if name in _KNOWN})
    except (ValueError, TypeError, AttributeError):
        return None


class TrafficTotals:
    """Events by what became of them, and bytes as the sandboxes saw them."""

    def __init__(self) -> None:
        self.events: Counter[NetworkVerdict] = Counter()
        self.sent = 0
        self.received = 0

    def count(self, event: NetworkEvent) -> None:
        """Count one event of an audit log."""
        self.events[event.verdict] += 1
        self.sent += event.sent
        self.received += event.received
