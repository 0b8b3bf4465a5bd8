"""Whether a lasting process is ready: a port that answers, or a line in its log.

Ports are asked from outside, by a socket of the sandbox's own network, so an image needs
nothing for it. Both the server and the log are hostile: every look at them is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias, get_args

from smokebox.engine.jail import guest_requests
from smokebox.engine.names import check_port
from smokebox.engine.processes.logs import LogReader, start_of
from smokebox.errors import InvalidOption
from smokebox.types import LogMatch

if TYPE_CHECKING:
    import socket

    from smokebox.engine.jail.api import Jail
    from smokebox.engine.processes.logs import ProcessLog
    from smokebox.types import LogChunk, Stream

PortMode = Literal["http", "tcp"]
Status: TypeAlias = int | tuple[int, int] | range

PROBE_SECONDS = 5.0
LEAST_INTERVAL = 0.01
# A line is searched by its last part from here on, in characters.
LONGEST_LINE = 64 << 10
# What a pattern finds at the very end of an unfinished line may be half of it ("port 80" of
# "port 8080"): it counts when nothing follows for so long.
SETTLE_SECONDS = 0.1

_ADDRESSES = ((4, "127.0.0.1"), (6, "::1"))
_STATUS_LINE = re.compile(rb"HTTP/[0-9](?:\.[0-9])? ([1-5][0-9][0-9])(?![0-9])")
_LONGEST_STATUS_LINE = 1024
_PATH = re.compile(r"/[!-~]*")
_DRAIN_SECONDS = 0.2
_DRAIN_SIZE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCheck:
    """What a port must do to be ready: take a connection, or answer with such a status."""

    port: int
    mode: PortMode
    path: str
    status: range
    interval: float

    def __str__(self) -> str:
        if self.mode == "tcp":
            return f"port {self.port} to take connections"
        statuses = f"{self.status.start}-{self.status.stop - 1}"
        return f"port {self.port} to answer GET {self.path} with {statuses}"


def check_for_port(
    port: int, mode: PortMode, path: str, status: Status, interval: float
) -> PortCheck:
    """The options of `wait_for_port`, once they can be."""
    if mode not in get_args(PortMode):
        _refuse("mode", mode, "'http' or 'tcp'", "Pass mode='tcp' for what is no web server.")
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        _refuse("path", path, "a path of printable ASCII that begins with '/'", "Quote the rest.")
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
        status=_statuses(status),
        interval=max(LEAST_INTERVAL, float(interval)),
    )


def check_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str] | str:
    """`pattern` itself, once it is text or a regular expression for text."""
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    if not isinstance(pattern, str) or not pattern:
        _refuse("pattern", pattern, "some text, or a compiled pattern for text", "Pass a str.")
    return pattern


async def until_ready(jail: Jail, check: PortCheck) -> None:
    """Ask a port again and again, and return when it is ready."""
    while True:
        if await _is_ready(jail, check):
            return
        await asyncio.sleep(check.interval)


async def find_line(log: ProcessLog, pattern: str | re.Pattern[str]) -> LogMatch | None:
    """The first line that fits, of those there and those to come; None at the log's end."""
    scanner = Scanner(pattern)
    with LogReader(log, start_of(log, None)) as reader, log.watched():
        while True:
            heard = log.bell.listen()
            if last := log.over:
                reader.stop_at_present()
            while chunk := await reader.next(final=last):
                if found := scanner.feed(chunk):
                    return found
                await asyncio.sleep(0)
            if last:
                return scanner.unsure
            if scanner.unsure is None:
                await heard.wait()
            elif not await _rings(heard, SETTLE_SECONDS):
                return scanner.unsure


class Scanner:
    """Looks for a pattern in lines, whole ones and the unfinished last ones of both streams."""

    def __init__(self, pattern: str | re.Pattern[str]) -> None:
        self._pattern = re.compile(re.escape(pattern)) if isinstance(pattern, str) else pattern
        self._literal = isinstance(pattern, str)
        self._rests: dict[Stream, str] = {}
        self._unsure: dict[Stream, LogMatch | None] = {}

    @property
    def unsure(self) -> LogMatch | None:
        """What fits at the end of an unfinished line, and may be half of something longer."""
        return next((found for found in self._unsure.values() if found), None)

    def feed(self, chunk: LogChunk) -> LogMatch | None:
        """Take a chunk, and give the first match that is sure."""
        before = "" if chunk.dropped else self._rests.get(chunk.stream, "")
        *lines, rest = ("" if chunk.dropped else before + chunk.data).split("\n")
        self._unsure[chunk.stream] = None
        for line in lines:
            if found := self._search(chunk.stream, line):
                return found
        self._rests[chunk.stream] = rest[-LONGEST_LINE:]
        found = self._search(chunk.stream, self._rests[chunk.stream])
        if found is None or self._literal or not rest.endswith(found.text):
            return found
        self._unsure[chunk.stream] = found
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
                    if check.mode == "tcp" or await _status(sock, check) in check.status:
                        return True
    return False


async def _status(sock: socket.socket, check: PortCheck) -> int | None:
    loop = asyncio.get_running_loop()
    request = (
        f"GET {check.path} HTTP/1.1\r\nHost: localhost:{check.port}\r\n"
        "User-Agent: smokebox\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    )
    await loop.sock_sendall(sock, request.encode())
    answer = b""
    while b"\n" not in answer and len(answer) < _LONGEST_STATUS_LINE:
        data = await loop.sock_recv(sock, _LONGEST_STATUS_LINE - len(answer))
        if not data:
            break
        answer += data
    await _drain(sock)
    found = _STATUS_LINE.match(answer)
    return int(found[1]) if found else None


async def _drain(sock: socket.socket) -> None:
    """Let a server finish: one that is cut off tells its own log of an error."""
    left = _DRAIN_SIZE
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0 and (data := await asyncio.get_running_loop().sock_recv(sock, left)):
                left -= len(data)


async def _rings(heard: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await heard.wait()
    except TimeoutError:
        return False
    return True


def _statuses(status: Status) -> range:
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


def _refuse(option: str, value: object, wanted: str, hint: str) -> NoReturn:
    raise InvalidOption(
        f"{option} is {wanted}, not {value!r:.80}.", hint=hint, option=option, value=value
    )
