"""The time that a sandbox keeps running without an engine.

A sandbox outlives its engine, so that the next engine can adopt it. If none attaches in time, the
sandbox ends and its files stay.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time

from smokebox.runtime.supervisor import receive_fds

# Message of an attached engine: the seconds to wait for another one after it is gone; 0 is for
# ever.
ORPHAN_TIMEOUT = struct.Struct("!d")

_LONGEST_POLL = 1 << 30


class EngineLease:
    """Connections of attached engines, and the deadline once there is none.

    `sender` passes the connection of another engine to the process that waits.
    """

    def __init__(self, poll: select.poll, engine: socket.socket, timeout: float) -> None:
        self.poll = poll
        self.timeout = timeout
        self.deadline: float | None = None
        self.engines: dict[int, socket.socket] = {}
        self.receiver, self.sender = socket.socketpair(type=socket.SOCK_SEQPACKET)
        poll.register(self.receiver, select.POLLIN)
        self.attach(engine)

    @property
    def expired(self) -> bool:
        """True once the sandbox has to end."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def attach(self, engine: socket.socket) -> None:
        """Count an engine as attached until it closes its connection."""
        self.engines[engine.fileno()] = engine
        self.poll.register(engine, select.POLLIN)
        self.deadline = None

    def wait(self) -> dict[int, int]:
        """Wait for events until the deadline, and return them by descriptor."""
        left = None
        if self.deadline is not None:
            left = min(max(0.0, self.deadline - time.monotonic()) * 1000, _LONGEST_POLL)
        ready = dict(self.poll.poll(left))
        for fd in ready.keys() & self.engines.keys():
            self._read(fd)
        if self.receiver.fileno() in ready:
            _, fds = receive_fds(self.receiver, 1, 1)
            for fd in fds:
                self.attach(socket.socket(fileno=fd))
        return ready

    def _read(self, fd: int) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = os.read(fd, ORPHAN_TIMEOUT.size)
        if len(data) == ORPHAN_TIMEOUT.size:
            [self.timeout] = ORPHAN_TIMEOUT.unpack(data)
            return
        self.poll.unregister(fd)
        self.engines.pop(fd).close()
        if not self.engines and self.timeout:
            self.deadline = time.monotonic() + self.timeout
