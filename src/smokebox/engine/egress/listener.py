"""Sockets of the egress proxy: accepts TCP connections and answers DNS datagrams.

Guest init has duplicates of both sockets. If a program of the sandbox takes control of it, it can
make them blocking and take what arrives: no call here may wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from smokebox.foundation.loop_shares import LoopShare

    Serve = Callable[[socket.socket], Coroutine[None, None, None]]

# Of one sandbox at a time. More wait in the backlog of the listening socket.
MAX_CONNECTIONS = 256
BACKLOG = 128

# Connections or datagrams to take before other work of the event loop gets a turn.
_BATCH = 32
_PAUSE_SECONDS = 0.01
_RETRY_SECONDS = 0.1
_MAX_QUERY = 4096


class Listener:
    """Accepts connections on a socket, and serves each in its own task."""

    def __init__(self, sock: socket.socket, serve: Serve) -> None:
        self._sock = sock
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._serving: set[asyncio.Task[None]] = set()
        self._unstarted: set[socket.socket] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._ready = select.poll()
        self._ready.register(sock, select.POLLIN)
        self._loop.add_reader(sock, self._accept)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._serving)

    async def close(self) -> None:
        """Stop accepting, and end the open connections."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        # A task that is cancelled before its first step closes nothing.
        while self._unstarted:
            self._unstarted.pop().close()

    async def _run(self, connection: socket.socket) -> None:
        self._unstarted.discard(connection)
        await self._serve(connection)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if len(self._serving) >= MAX_CONNECTIONS:
                # `_on_done` resumes.
                self._loop.remove_reader(self._sock)
                return
            try:
                # There is no MSG_DONTWAIT for it.
                self._sock.setblocking(False)
                if not self._ready.poll(0):
                    return
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # No descriptors or memory left, or guest init shut the socket down: it would stay
                # readable.
                self._loop.remove_reader(self._sock)
                self._retry = self._loop.call_later(_RETRY_SECONDS, self._resume)
                return
            connection.setblocking(False)
            self._unstarted.add(connection)
            task = self._loop.create_task(self._run(connection))
            self._serving.add(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        full = len(self._serving) >= MAX_CONNECTIONS
        self._serving.discard(task)
        if not task.cancelled():
            # Otherwise asyncio logs that the exception was never retrieved.
            task.exception()
        if full and not self._closed:
            self._resume()

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept)


class DnsListener:
    """Answers DNS datagrams, at a bounded rate."""

    def __init__(
        self,
        sock: socket.socket,
        answer: Callable[[bytes], bytes | None],
        share: Callable[[], LoopShare | None],
    ) -> None:
        self._sock = sock
        self._answer = answer
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Stop answering."""
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()

    def _read(self) -> None:
        share = self._share()
        done = self._answer_batch() if share is None else share.run(self._answer_batch)
        if not done or (share is not None and share.used_up):
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _answer_batch(self) -> bool:
        """Answer a number of queries; return whether there are no more."""
        for _ in range(_BATCH):
            try:
                query, sender = self._sock.recvfrom(_MAX_QUERY, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            answer = self._answer(query)
            if answer is not None:
                # Do not wait for a sender that does not read.
                with contextlib.suppress(OSError):
                    self._sock.sendto(answer, socket.MSG_DONTWAIT, sender)
        return False

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._read)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingConnection:
    """A connection of a program. `sock` is non-blocking, and nothing was read from it.

    `address` and `port` are its destination. `host` is the name that the program resolved with
    our DNS to that address, in lower case without a final dot; None if it used the address.
    `hello` is True if the first bytes are a TLS ClientHello, and `sni` is the server name in it.
    """

    sock: socket.socket
    address: str
    port: int
    host: str | None = None
    hello: bool = False
    sni: str | None = None
