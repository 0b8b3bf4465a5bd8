"""Readiness of a background process: a port that responds, or a line in its log.

Ports are probed with a socket in the sandbox's network, so an image needs no tool for it. Both the
server and the log are hostile: every probe is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias, get_args

from smokebox.engine.jail import guest_requests
from smokebox.engine.names import check_port
from smokebox.engine.processes.logs import LogReader
from smokebox.errors import InvalidOption
from smokebox.types import LogMatch

if TYPE_CHECKING:
    import socket

    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.processes.logs import ProcessLog
    from smokebox.types import LogChunk, Stream

PortMode = Literal["http", "tcp"]
Status: TypeAlias = int | tuple[int, int] | range

PROBE_SECONDS = 5.0
MIN_INTERVAL = 0.01
# Only the last characters of a longer line are searched.
LONGEST_LINE = 64 << 10
# A match at the end of an incomplete line may be partial ("port 80" of "port 8080"): it counts
# once no output follows for this long.
SETTLE_SECONDS = 0.1

_ADDRESSES = ((4, "127.0.0.1"), (6, "::1"))
_STATUS_LINE = re.compile(rb"HTTP/[0-9](?:\.[0-9])? ([1-5][0-9][0-9])(?![0-9])")
_LONGEST_STATUS_LINE = 1024
_PATH = re.compile(r"/[!-~]*")
_DRAIN_SECONDS = 0.2
_DRAIN_SIZE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCheck:
    """Condition for a port: it accepts a connection, or responds with one of the statuses."""

    port: int
    mode: PortMode
    path: str
    status: range
    interval: float

    def __str__(self) -> str:
        if self.mode == "tcp":
            return f"port {self.port} to accept connections"
        statuses = f"{self.status.start}-{self.status.stop - 1}"
        return f"port {self.port} to respond to GET {self.path} with {statuses}"


def parse_port_check(
    port: int, mode: PortMode, path: str, status: Status, interval: float
) -> PortCheck:
    """Check the options of `wait_for_port`."""
    if mode not in get_args(PortMode):
        _refuse("mode", mode, "'http' or 'tcp'", "Pass mode='tcp' for a server without HTTP.")
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        _refuse(
            "path", path, "a path of printable ASCII that begins with '/'", "Percent-encode it."
        )
    if (
        isinstance(interval, bool)
        or not isinstance(interval, (int, float))
        or not 0 < interval < float("inf")
    ):
        _refuse("interval", interval, "a positive number of seconds", "Pass interval=0.1.")
    return PortCheck(
        port=check_port(port),
        mode=mode,
        path=path,
        status=_parse_status(status),
        interval=max(MIN_INTERVAL, float(interval)),
    )


def check_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str] | str:
    """Return `pattern` if it is text or a regular expression for text."""
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    if not isinstance(pattern, str) or not pattern:
        _refuse("pattern", pattern, "text, or a compiled pattern for text", "Pass a str.")
    return pattern


async def wait_until_ready(jail: Jail, check: PortCheck) -> None:
    """Probe a port until it is ready."""
    while True:
        if await _is_ready(jail, check):
            return
        await asyncio.sleep(check.interval)


async def find_line(log: ProcessLog, pattern: str | re.Pattern[str]) -> LogMatch | None:
    """Wait for the first line that matches; return None if the log ends without one."""
    scanner = LineScanner(pattern)
    with LogReader(log, log.parse_cursor(None)) as reader, log.watched():
        while True:
            changed = log.changed.event
            if last := log.finished:
                reader.stop_at_present()
            while chunk := await reader.next(final=last):
                if found := scanner.feed(chunk):
                    return found
                await asyncio.sleep(0)
            if last:
                return scanner.partial
            try:
                async with asyncio.timeout(SETTLE_SECONDS if scanner.partial else None):
                    await changed.wait()
            except TimeoutError:
                return scanner.partial


class LineScanner:
    """Searches complete lines, and the incomplete last line of each stream, for a pattern."""

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        self._pattern = re.compile(re.escape(pattern)) if isinstance(pattern, str) else pattern
        self._literal = isinstance(pattern, str)
        self._rests: dict[Stream, str] = {}
        self._partial: dict[Stream, LogMatch | None] = {}

    @property
    def partial(self) -> LogMatch | None:
        """A match at the end of an incomplete line, which further output may extend."""
        return next((found for found in self._partial.values() if found), None)

    def feed(self, chunk: LogChunk) -> LogMatch | None:
        """Add a chunk, and return the first match that further output cannot change."""
        text = "" if chunk.dropped else self._rests.get(chunk.stream, "") + chunk.data
        *lines, rest = text.split("\n")
        self._partial[chunk.stream] = None
        for line in lines:
            if found := self._search(chunk.stream, line):
                return found
        self._rests[chunk.stream] = rest[-LONGEST_LINE:]
        found = self._search(chunk.stream, rest)
        if found is None or self._literal or not rest.endswith(found.text):
            return found
        self._partial[chunk.stream] = found
        return None

    def _search(self, stream: Stream, line: str) -> LogMatch | None:
        line = line.removesuffix("\r")[-LONGEST_LINE:]
        found = self._pattern.search(line)
        if found is None:
            return None
        return LogMatch(stream=stream, line=line, text=found[0], groups=found.groups())


async def _is_ready(jail: Jail, check: PortCheck) -> bool:
    for version, address in _ADDRESSES:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(PROBE_SECONDS):
                with await guest_requests.open_socket(jail, version=version) as sock:
                    await asyncio.get_running_loop().sock_connect(sock, (address, check.port))
                    if check.mode == "tcp" or await _get_status(sock, check) in check.status:
                        return True
    return False


async def _get_status(sock: socket.socket, check: PortCheck) -> int | None:
    loop = asyncio.get_running_loop()
    request = (
        f"GET {check.path} HTTP/1.1\r\nHost: localhost:{check.port}\r\n"
        "User-Agent: smokebox\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    )
    await loop.sock_sendall(sock, request.encode())
    head = b""
    while b"\n" not in head and len(head) < _LONGEST_STATUS_LINE:
        data = await loop.sock_recv(sock, _LONGEST_STATUS_LINE - len(head))
        if not data:
            break
        head += data
    await _drain(sock)
    found = _STATUS_LINE.match(head)
    return int(found[1]) if found else None


async def _drain(sock: socket.socket) -> None:
    """Let the server finish its response: a reset connection would show up in its log."""
    left = _DRAIN_SIZE
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0 and (data := await asyncio.get_running_loop().sock_recv(sock, left)):
                left -= len(data)


def _parse_status(status: Status) -> range:
    bounds: object = status
    if isinstance(status, range) and status.step == 1:
        bounds = (status.start, status.stop - 1)
    elif isinstance(status, int) and not isinstance(status, bool):
        bounds = (status, status)
    if isinstance(bounds, (tuple, list)) and len(bounds) == 2:
        first, last = bounds
        whole = type(first) is int and type(last) is int
        if whole and 100 <= first <= last <= 599:
            return range(first, last + 1)
    _refuse("status", status, "an HTTP status, or two from 100 to 599", "Pass status=(200, 399).")


def _refuse(option: str, value: object, expected: str, hint: str) -> NoReturn:
    raise InvalidOption(
        f"{option} is {expected}, not {value!r:.80}.", hint=hint, option=option, value=value
    )
