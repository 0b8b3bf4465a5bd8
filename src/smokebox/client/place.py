"""The socket of a state directory: by a name that the kernel takes, and whether it is served."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# sun_path has 108 bytes, one of them for the end.
_LONGEST_SOCKET = 107
_CONNECT_SECONDS = 5.0


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


def listens(path: str) -> bool:
    """Whether anybody listens at a socket's path."""
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(_CONNECT_SECONDS)
        with short_path(path) as name:
            sock.connect(name)
        return True
    return False
