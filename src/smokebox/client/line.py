"""The WebSocket of a terminal: read all the time, so that its other side knows we live."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from smokebox.client.answering import losing, lost
from smokebox.errors import ProcessEnded, SmokeboxError
from smokebox.wire.codec import decode
from smokebox.wire.failure import Failure, error_of
from smokebox.wire.frames import LARGEST_FRAME, ErrorFrame, ReadyFrame, ResizeFrame
from smokebox.wire.frames import TerminalExitFrame as ExitFrame

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from smokebox.client.socket import Socket

MOST_KEPT = 4 << 20
"""How many bytes of output are kept for one who does not read; older ones are dropped."""

_FRAMES = ReadyFrame | ExitFrame | ErrorFrame


class Line:
    """A connection to a terminal. `dropped` counts the bytes that nobody read in time."""

    def __init__(self, opening: AbstractAsyncContextManager[Socket]) -> None:
        self.exit_code: int | None = None
        self.dropped = 0
        self._opening = opening
        self._stack = contextlib.AsyncExitStack()
        self._pieces: deque[bytes] = deque()
        self._kept = 0
        self._news = asyncio.Event()
        self._fault: SmokeboxError | None = None
        self._over = False

    async def open(self) -> None:
        """Connect, and begin to read."""
        self._socket = await self._stack.enter_async_context(self._opening)
        self._reading = asyncio.create_task(self._read())

    async def read(self) -> bytes | None:
        """The next piece of output; None after the last."""
        while not self._pieces:
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if self._over:
                return None
            await self._wait()
        piece = self._pieces.popleft()
        self._kept -= len(piece)
        return piece

    async def wait(self) -> int:
        """The exit code of the program, once it has ended."""
        while not self._over:
            await self._wait()
        if self.exit_code is None:
            raise self._fault or lost("the terminal")
        return self.exit_code

    async def write(self, data: bytes) -> None:
        """Type."""
        for start in range(0, len(data), LARGEST_FRAME):
            self._check()
            with losing("the terminal"):
                await self._socket.send(data[start : start + LARGEST_FRAME])

    async def resize(self, cols: int, rows: int) -> None:
        """Have it be of another size."""
        self._check()
        frame = msgspec.json.encode(ResizeFrame(cols=cols, rows=rows)).decode()
        with losing("the terminal"):
            await self._socket.send(frame)

    async def aclose(self) -> None:
        """Hang up; the terminal stays."""
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._stack.aclose()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _check(self) -> None:
        if self._over:
            raise self._fault or ProcessEnded(
                f"the terminal has ended with {self.exit_code}.",
                hint="Create another.",
                exit_code=self.exit_code,
            )

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if isinstance(message, bytes):
                    self._keep(message)
                else:
                    self._hear(message.encode())
        finally:
            if self.exit_code is None:
                self._fault = self._fault or lost("the terminal")
            self._over = True
            self._news.set()

    def _keep(self, data: bytes) -> None:
        self._pieces.append(data)
        self._kept += len(data)
        while self._kept > MOST_KEPT:
            gone = len(self._pieces.popleft())
            self._kept -= gone
            self.dropped += gone
        self._news.set()

    def _hear(self, data: bytes) -> None:
        frame: ReadyFrame | ExitFrame | ErrorFrame = decode(_FRAMES, data)  # type: ignore[arg-type]
        if isinstance(frame, ExitFrame):
            self.exit_code, self._over = frame.code, True
        elif isinstance(frame, ErrorFrame):
            self._fault = error_of(Failure(code=frame.code, message=frame.message))
        self._news.set()
