"""Unix sockets of state directories: paths that fit the kernel, and a check for a listener."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# sun_path has 108 bytes, including the terminating zero.
_LONGEST_SOCKET = 107
_CONNECT_SECONDS = 5.0


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Yield a path that fits into `sun_path` for a socket whose own may be too long."""
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def listens(path: str) -> bool:
    """Return whether a process listens at a socket's path."""
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(_CONNECT_SECONDS)
        with short_path(path) as name:
            sock.connect(name)
        return True
    return False
