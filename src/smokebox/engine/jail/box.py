"""A jail's directory on the host: what the sandbox wrote, its sockets, its logs."""

from __future__ import annotations

import contextlib
import os
import socket

# Others may pass through, and see nothing: root inside is nobody out here, and the state
# directory above is closed to all but its owner.
_PASSABLE = 0o711
_BACKLOG = 1024


def lay_out(directory: str, targets: int) -> None:
    """Make what is missing of a jail's directory."""
    for name, mode in (
        ("", _PASSABLE),
        ("data", 0o755),
        ("data/upper", 0o755),
        ("data/work", 0o755),
        ("root", 0o755),
        ("run", _PASSABLE),
        ("run/io", 0o755),
        *(
            (f"data/{kind}/{number}", 0o755)
            for kind in ("upper", "work")
            for number in range(targets)
        ),
    ):
        path = os.path.join(directory, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, mode)


def listen(box: int) -> socket.socket:
    """The socket that the agent listens on, in `run` of the directory behind `box`."""
    # A path of any length, by a short name: sockets take 107 bytes.
    path = f"/proc/self/fd/{box}/run/agent.sock"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
