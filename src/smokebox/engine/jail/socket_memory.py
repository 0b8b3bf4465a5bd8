"""Memory that the sockets of a sandbox hold, by the kernel's socket diagnostics.

Where there is no cgroup, nothing else counts it: the kernel attributes it to no process.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NETLINK_SOCK_DIAG = 4
MEASURE_SECONDS = 0.2

_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ANY = 0xFFFFFFFF
# struct unix_diag_req, and the sizes of struct unix_diag_msg and inet_diag_msg.
_UNIX_REQUEST = struct.Struct("=BBHIIIII")
_UNIX_MESSAGE, _INET_MESSAGE = 16, 72
_SHOW_QUEUES_AND_MEMORY = 0x10 | 0x20
_UNIX_QUEUES, _UNIX_MEMORY = 4, 5
_INET_REQUEST = struct.Struct("=BBBxI48x")
_INET_MEMORY = 7
# The first fields of a memory attribute: received, its limit, sent, its limit, reserved, queued.
_MEMORY = struct.Struct("=6I")
_QUEUES = struct.Struct("=II")


class SocketMemory:
    """Adds up the memory of all sockets of a network namespace.

    `sock` is a diagnostics socket of that namespace. Guest init, which opened it, may interfere:
    the result is then too low.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._number = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the diagnostics socket."""
        self._sock.close()

    def measure(self) -> int:
        """Return the bytes; a lower bound if there are too many sockets to count in time."""
        with self._lock:
            deadline = time.monotonic() + MEASURE_SECONDS
            total = self._unix(deadline)
            for family in (socket.AF_INET, socket.AF_INET6):
                for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                    total += self._inet(family, protocol, deadline)
            return total

    def _unix(self, deadline: float) -> int:
        """Data is counted for its sender, or if that is closed, where it waits."""
        request = _UNIX_REQUEST.pack(
            socket.AF_UNIX, 0, 0, _ANY, 0, _SHOW_QUEUES_AND_MEMORY, _ANY, _ANY
        )
        sent = waiting = 0
        for message in self._dump(request, deadline):
            for kind, data in _attributes(message[_UNIX_MESSAGE:]):
                if kind == _UNIX_MEMORY:
                    sent += _MEMORY.unpack_from(data)[2]
                elif kind == _UNIX_QUEUES:
                    waiting += _QUEUES.unpack_from(data)[0]
        return max(sent, waiting)

    def _inet(self, family: int, protocol: int, deadline: float) -> int:
        request = _INET_REQUEST.pack(family, protocol, 1 << (_INET_MEMORY - 1), _ANY)
        total = 0
        for message in self._dump(request, deadline):
            for kind, data in _attributes(message[_INET_MESSAGE:]):
                if kind == _INET_MEMORY:
                    received, _, sent, _, reserved, queued = _MEMORY.unpack_from(data)
                    total += received + reserved + max(sent, queued)
        return total

    def _dump(self, request: bytes, deadline: float) -> Iterator[bytes]:
        """Yield the messages of a response, until its end or the deadline."""
        self._number += 1
        header = _HEADER.pack(
            _HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, self._number, 0
        )
        try:
            self._sock.send(header + request, socket.MSG_DONTWAIT)
            while time.monotonic() < deadline:
                # The kernel has the response ready. If another reader took it, do not wait.
                data = self._sock.recv(1 << 16, socket.MSG_DONTWAIT)
                for kind, number, message in _messages(data):
                    if number == self._number and kind != _BY_FAMILY:
                        return
                    if number == self._number:
                        yield message
        except OSError:
            # This kernel lacks the diagnostics of the family.
            return


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the type, the sequence number and the content of each netlink message."""
    while len(data) >= _HEADER.size:
        length, kind, _, number, _ = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            return
        yield kind, number, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= length <= len(data):
            return
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
