"""The server of a state directory, asked without an event loop: by its socket, for its health."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# sun_path has 108 bytes, one of them for the end.
_LONGEST_SOCKET = 107
_CREDENTIALS = "3i"


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """A socket's path of any length, by a name that the kernel takes, within the block."""
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


class LocalConnection(http.client.HTTPConnection):
    """HTTP over a unix socket; `peer` is the process that listens on it, if one can see it."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path
        self.peer: int | None = None

    def connect(self) -> None:
        """Connect, and see who is there."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with short_path(self._path) as path:
            self.sock.connect(path)
        size = struct.calcsize(_CREDENTIALS)
        told = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.peer = struct.unpack(_CREDENTIALS, told)[0] or None
