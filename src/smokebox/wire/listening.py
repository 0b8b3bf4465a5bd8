"""Ports of this machine that are listened on."""

from __future__ import annotations

import socket

from smokebox.errors import Conflict

BACKLOG = 2048


def listen(
    host: str, port: int, *, hint: str = "Use another with --port, or stop what has it."
) -> socket.socket:
    """A socket that listens on a port, 0 for any that is free. Raises `Conflict` with the hint."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Conflict(
            f"{host}:{port} cannot be listened on: {error.strerror or error}.",
            hint=hint,
            kind="port",
            name=str(port),
        ) from error
    # What is accepted from it has this too; asyncio itself does not see that it is TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where that is, for who asks by HTTP."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
