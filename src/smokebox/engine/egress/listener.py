"""Sockets of the egress proxy: accepts TCP connections and answers DNS datagrams."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    Serve = Callable[[socket.socket], Coroutine[None, None, None]]


# At once, of one sandbox. What comes beyond waits in the queue of the listening socket.
MOST_CONNECTIONS = 256
BACKLOG = 128

# How many are taken before others have their turn, and how long it then is theirs.
_AT_ONCE = 32
_PAUSE_SECONDS = 0.01
_RETRY_SECONDS = 0.1
_LARGEST_QUESTION = 4096


class Listener:
    """Takes connections from a listening socket, each served by a task of its own."""

    def __init__(self, sock: socket.socket, serve: Serve, most: int = MOST_CONNECTIONS) -> None:
        self._sock = sock
        self._serve = serve
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._serving: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop.add_reader(sock, self._accept)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._serving)

    async def close(self) -> None:
        """Take no more, and end those that are served."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        if self._later is not None:
            self._later.cancel()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._serving) >= self._most:
                # Until one of them ends.
                self._loop.remove_reader(self._sock)
                return
            try:
                connection, _ = self._sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._loop.remove_reader(self._sock)
                    self._later = self._loop.call_later(_RETRY_SECONDS, self._resume)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        full = len(self._serving) >= self._most
        self._serving.discard(task)
        if not task.cancelled():
            task.exception()
        if full and not self._closed:
            self._resume()

    def _resume(self) -> None:
        self._later = None
        self._loop.add_reader(self._sock, self._accept)


class DnsListener:
    """Answers datagrams, and no more of them than leaves others their turn."""

    def __init__(self, sock: socket.socket, answer: Callable[[bytes], bytes | None]) -> None:
        self._sock = sock
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Answer no more."""
        self._loop.remove_reader(self._sock)
        if self._later is not None:
            self._later.cancel()

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                question, who = self._sock.recvfrom(_LARGEST_QUESTION)
            except OSError:
                return
            answer = self._answer(question)
            if answer is not None:
                # Who asks and does not listen is not waited for.
                with contextlib.suppress(OSError):
                    self._sock.sendto(answer, who)
        self._loop.remove_reader(self._sock)
        self._later = self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._later = None
        self._loop.add_reader(self._sock, self._read)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingConnection:
    """`sock` is non-blocking, and nothing was read from it.

    `address` and `port` are where the program wanted to go. `host` is the name that it
    asked our DNS for, in lower case without a final dot; None where it used an address.
    `hello` says that the first bytes are those of TLS, and `sni` the name in them.
    """

    sock: socket.socket
    address: str
    port: int
    host: str | None = None
    hello: bool = False
    sni: str | None = None
