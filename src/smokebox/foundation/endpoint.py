"""Addresses of servers on this machine: state directory, unix socket and ports."""

from __future__ import annotations

import os
import socket

from smokebox.errors import Conflict

BACKLOG = 2048


def default_home() -> str:
    """Return the absolute path of the default state directory."""
    if home := os.environ.get("SMOKEBOX_HOME"):
        return os.path.abspath(os.path.expanduser(home))
    data = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(data):
        # The XDG specification says to ignore relative paths.
        data = os.path.expanduser("~/.local/share")
    return os.path.join(data, "smokebox")


def socket_path(home: str) -> str:
    """Return the path of the unix socket on which the server of a state directory listens."""
    return os.path.join(home, "server.sock")


def log_path(home: str) -> str:
    """Return the path of the log of a background server."""
    return os.path.join(home, "server.log")


def listen(
    host: str, port: int, *, hint: str = "Use another --port, or stop the program that has it."
) -> socket.socket:
    """Listen on a port, 0 for any free one. Raises `Conflict` with the hint."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Conflict(
            f"cannot listen on {host}:{port}: {error.strerror or error}.",
            hint=hint,
            kind="port",
            name=str(port),
        ) from error
    # Accepted sockets inherit it. asyncio sets it only on sockets that it knows to be TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the HTTP URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
