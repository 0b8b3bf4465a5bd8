"""Handle of a program on a pseudo-terminal in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

import msgspec

from smokebox import wire
from smokebox.client.http_client import WebSocketRefused, connection_lost
from smokebox.client.sandbox_connection import path_segment
from smokebox.client.transport import deadline
from smokebox.errors import ProcessEnded, ServiceUnavailable, SmokeboxError
from smokebox.foundation.text import encode_option
from smokebox.options import check_timeout
from smokebox.types import TerminalInfo
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, error_of
from smokebox.wire.frames import (
    LARGEST_FRAME,
    ErrorFrame,
    ReadyFrame,
    ResizeFrame,
    TerminalExitFrame,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from smokebox.client.http_client import ApiWebSocket
    from smokebox.client.sandbox_connection import SandboxConnection

# Bytes of unread output that are kept; the oldest are dropped.
_MAX_UNREAD = 4 << 20
_FRAMES = ReadyFrame | TerminalExitFrame | ErrorFrame


class Terminal(AsyncIterator[bytes]):
    """A program on a pseudo-terminal.

    `async for` yields its output: recent output first, then live output until it ends. The
    first use connects, on one event loop. Closing the handle leaves the program running;
    `kill` ends it.
    """

    def __init__(self, connection: SandboxConnection, info: TerminalInfo) -> None:
        self.id = info.id
        self.info = info
        self._connection = connection
        self._path = f"/terminals/{path_segment('terminal', info.id)}"
        self._attached: _TerminalSocket | None = None
        self._attaching: asyncio.Lock | None = None

    @property
    def dropped(self) -> int:
        """Number of bytes of output that were dropped because they were not read in time."""
        return 0 if self._attached is None else self._attached.dropped

    async def __anext__(self) -> bytes:
        data = await (await self._attach()).read()
        if data is None:
            raise StopAsyncIteration
        return data

    async def write(self, data: str | bytes) -> None:
        """Send input. Waits while the program has much unread input.

        Args:
            data: Text, sent as UTF-8, or bytes. Keys are escape sequences: Ctrl-C is "\\x03".

        Raises:
            ProcessEnded: The program has ended.
            SandboxGone: The sandbox or its server stopped.
        """
        content = encode_option("data", data)
        await (await self._attach()).write(content)

    async def resize(self, *, cols: int, rows: int) -> None:
        """Change the size; the program gets SIGWINCH.

        Args:
            cols: Width in characters.
            rows: Height in lines.

        Raises:
            ProcessEnded: The program has ended.
        """
        await (await self._attach()).resize(cols, rows)

    async def wait(self, timeout: float | None = None) -> int:
        """Wait until the program has ended, and return its exit code.

        Args:
            timeout: Seconds to wait, by default without a limit.

        Raises:
            DeadlineExceeded: It did not end within `timeout` seconds.
        """
        socket = await self._attach()
        if (seconds := check_timeout(timeout)) is None:
            return await socket.wait()
        async with deadline(seconds, f"waiting for the end of terminal {self.id}"):
            return await socket.wait()

    async def refresh(self) -> TerminalInfo:
        """Update `info` from the server and return it.

        Raises:
            NotFound: The terminal was deleted.
        """
        self.info = await self._connection.request(TerminalInfo, "GET", self._path)
        return self.info

    async def kill(self) -> None:
        """Kill the program with everything it started, and delete the terminal."""
        await self.aclose()
        await self._connection.request(type(None), "DELETE", self._path, timeout=None)

    async def aclose(self) -> None:
        """Disconnect; the program keeps running. The next use connects again."""
        socket, self._attached = self._attached, None
        if socket is not None:
            await socket.aclose()

    async def __aenter__(self) -> Self:
        await self._attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Terminal {self.id!r} of sandbox {self._connection.id!r}>"

    async def _attach(self) -> _TerminalSocket:
        if self._attached is not None:
            return self._attached
        self._attaching = self._attaching or asyncio.Lock()
        async with self._attaching:
            if self._attached is None:
                self._attached = await self._connect()
        return self._attached

    async def _connect(self) -> _TerminalSocket:
        socket = _TerminalSocket()
        try:
            await socket.open(self._connection.websocket(self._path, heartbeat=wire.SILENCE / 2))
        except WebSocketRefused as error:
            # The refusal of a WebSocket has no body: a plain request raises the reason.
            await self.refresh()
            raise ServiceUnavailable(
                f"terminal {self.id} cannot be connected to: {error}.",
                hint="Check that proxies on the way support WebSockets.",
                service="server",
            ) from error
        return socket


class _TerminalSocket:
    """A WebSocket to a terminal, read all the time: unread pings would end it."""

    def __init__(self) -> None:
        self.dropped = 0
        self._stack = contextlib.AsyncExitStack()
        self._unread: deque[bytes] = deque()
        self._unread_size = 0
        self._changed = asyncio.Event()
        self._exit_code: int | None = None
        self._error: SmokeboxError | None = None
        self._ended = False

    async def open(self, opening: AbstractAsyncContextManager[ApiWebSocket]) -> None:
        """Connect and start reading."""
        self._websocket = await self._stack.enter_async_context(opening)
        self._reader = asyncio.create_task(self._read())

    async def read(self) -> bytes | None:
        """Return the next piece of output; None after the last."""
        while not self._unread:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                return None
            await self._wait_for_change()
        data = self._unread.popleft()
        self._unread_size -= len(data)
        return data

    async def wait(self) -> int:
        """Wait until the program has ended, and return its exit code."""
        while not self._ended:
            await self._wait_for_change()
        if self._exit_code is None:
            raise self._error or connection_lost("the terminal")
        return self._exit_code

    async def write(self, data: bytes) -> None:
        """Send input."""
        for start in range(0, len(data), LARGEST_FRAME):
            await self._send(data[start : start + LARGEST_FRAME])

    async def resize(self, cols: int, rows: int) -> None:
        """Change the size."""
        await self._send(msgspec.json.encode(ResizeFrame(cols=cols, rows=rows)).decode())

    async def aclose(self) -> None:
        """Disconnect."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._stack.aclose()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _send(self, message: str | bytes) -> None:
        if self._ended:
            raise self._error or ProcessEnded(
                f"the program of the terminal has ended with exit code {self._exit_code}.",
                hint="Create another terminal.",
                exit_code=self._exit_code,
            )
        try:
            await self._websocket.send(message)
        except ConnectionResetError as error:
            raise connection_lost("the terminal") from error

    async def _read(self) -> None:
        try:
            async for message in self._websocket:
                if isinstance(message, bytes):
                    self._buffer(message)
                else:
                    self._receive(message.encode())
        finally:
            if self._exit_code is None:
                self._error = self._error or connection_lost("the terminal")
            self._ended = True
            self._changed.set()

    def _buffer(self, data: bytes) -> None:
        self._unread.append(data)
        self._unread_size += len(data)
        while self._unread_size > _MAX_UNREAD:
            size = len(self._unread.popleft())
            self._unread_size -= size
            self.dropped += size
        self._changed.set()

    def _receive(self, data: bytes) -> None:
        frame: ReadyFrame | TerminalExitFrame | ErrorFrame = decode(_FRAMES, data)  # type: ignore[arg-type]
        if isinstance(frame, TerminalExitFrame):
            self._exit_code, self._ended = frame.code, True
        elif isinstance(frame, ErrorFrame):
            self._error = error_of(Failure(code=frame.code, message=frame.message))
        self._changed.set()
