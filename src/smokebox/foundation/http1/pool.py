"""Idle connections, kept for the next request to the same server."""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from smokebox.foundation.http1.connection import Connection

# Servers close idle connections after five seconds or more (node, uvicorn). A request that may
# not be sent twice would fail on one that is being closed.
IDLE_SECONDS = 4.0
MAX_IDLE = 32


class ConnectionPool:
    """Idle connections by key, on one event loop.

    Args:
        idle_seconds: How long one is kept.
        max_idle: How many are kept for one key; the oldest is closed first.
    """

    def __init__(
        self,
        *,
        idle_seconds: float = IDLE_SECONDS,
        max_idle: int = MAX_IDLE,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._max_idle = max_idle
        self._idle: dict[Hashable, list[tuple[float, Connection]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, key: Hashable) -> Connection | None:
        """Remove and return the connection that was used last and is still open, if any."""
        idle = self._idle.get(key)
        while idle:
            since, connection = idle.pop()
            connection.idle = False
            fresh = asyncio.get_running_loop().time() - since < self._idle_seconds
            usable = fresh and not connection.ended and not connection.buffered
            # The kernel may have more than the event loop has seen: the end, or bytes that
            # belong to no response.
            if usable and _quiet(connection):
                return connection
            connection.abort()
        return None

    def put(self, key: Hashable, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if it cannot have one."""
        if self._closed or connection.ended or connection.buffered:
            connection.abort()
            return
        connection.on_lost = None
        connection.idle = True
        idle = self._idle.setdefault(key, [])
        idle.append((asyncio.get_running_loop().time(), connection))
        if len(idle) > self._max_idle:
            idle.pop(0)[1].close()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._close_old)

    def close(self) -> None:
        """Close all idle connections, and keep none from here on."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for idle in self._idle.values():
            for _, connection in idle:
                connection.abort()
        self._idle.clear()

    def _close_old(self) -> None:
        oldest = asyncio.get_running_loop().time() - self._idle_seconds
        for key, idle in list(self._idle.items()):
            for since, connection in idle:
                if since <= oldest:
                    connection.close()
            fresh = [(since, one) for since, one in idle if since > oldest and not one.ended]
            if fresh:
                self._idle[key] = fresh
            else:
                del self._idle[key]
        more = self._idle and not self._closed
        self._timer = (
            asyncio.get_running_loop().call_later(self._idle_seconds, self._close_old)
            if more
            else None
        )


def _quiet(connection: Connection) -> bool:
    """Tell whether the server neither closed the connection nor sent anything unasked."""
    poll = select.poll()
    poll.register(connection.transport.get_extra_info("socket").fileno(), select.POLLIN)
    return not poll.poll(0)
