"""Handle of a program on a pseudo-terminal in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from smokebox import wire
from smokebox.client.answering import Refused, deadline
from smokebox.client.line import Line
from smokebox.client.sandbox_connection import path_segment
from smokebox.errors import ServiceUnavailable
from smokebox.foundation.text import encode_option
from smokebox.options import check_timeout
from smokebox.types import TerminalInfo

if TYPE_CHECKING:
    from smokebox.client.sandbox_connection import SandboxConnection


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
        self._line: Line | None = None
        self._connecting: asyncio.Lock | None = None

    @property
    def dropped(self) -> int:
        """Number of bytes of output that were dropped because they were not read in time."""
        return 0 if self._line is None else self._line.dropped

    async def __anext__(self) -> bytes:
        piece = await (await self._connected()).read()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def write(self, data: str | bytes) -> None:
        """Send input. Waits while the program has much unread input.

        Args:
            data: Text, sent as UTF-8, or bytes. Keys are escape sequences: Ctrl-C is "\\x03".

        Raises:
            SandboxGone: The sandbox or its server stopped.
        """
        content = encode_option("data", data)
        await (await self._connected()).write(content)

    async def resize(self, *, cols: int, rows: int) -> None:
        """Change the size; the program gets SIGWINCH.

        Args:
            cols: Width in characters.
            rows: Height in lines.
        """
        await (await self._connected()).resize(cols, rows)

    async def wait(self, timeout: float | None = None) -> int:
        """Wait until the program has ended, and return its exit code.

        Args:
            timeout: Seconds to wait, by default without a limit.

        Raises:
            DeadlineExceeded: It did not end within `timeout` seconds.
        """
        line = await self._connected()
        if (seconds := check_timeout(timeout)) is None:
            return await line.wait()
        async with deadline(seconds, f"the end of terminal {self.id}"):
            return await line.wait()

    async def refresh(self) -> TerminalInfo:
        """Update `info` from the server and return it."""
        self.info = await self._connection.request(TerminalInfo, "GET", self._path)
        return self.info

    async def kill(self) -> None:
        """Kill the program with everything it started, and delete the terminal."""
        await self.aclose()
        await self._connection.request(type(None), "DELETE", self._path, timeout=None)

    async def aclose(self) -> None:
        """Disconnect; the program keeps running. The next use connects again."""
        line, self._line = self._line, None
        if line is not None:
            await line.aclose()

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Terminal {self.id!r} of sandbox {self._connection.id!r}>"

    async def _connected(self) -> Line:
        if self._line is not None:
            return self._line
        self._connecting = self._connecting or asyncio.Lock()
        async with self._connecting:
            if self._line is None:
                self._line = await self._connect()
        return self._line

    async def _connect(self) -> Line:
        line = Line(self._connection.socket(self._path, heartbeat=wire.SILENCE / 2))
        try:
            await line.open()
        except Refused as error:
            # The refusal of a WebSocket has no body: a plain request raises the reason.
            await self.refresh()
            raise ServiceUnavailable(
                f"terminal {self.id} cannot be connected to: {error}.",
                hint="Check that proxies on the way support WebSockets.",
                service="server",
            ) from error
        return line
