"""The handle of a terminal of a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from smokebox import wire
from smokebox.client.answering import Refused, deadline
from smokebox.client.handle import part
from smokebox.client.line import Line
from smokebox.errors import ServiceUnavailable
from smokebox.options import check_timeout
from smokebox.sandbox.text import encode_option
from smokebox.types import TerminalInfo

if TYPE_CHECKING:
    from smokebox.client.handle import Handle


class Terminal(AsyncIterator[bytes]):
    """A program that believes it talks to a screen and a keyboard.

    Its output comes by `async for`: first what it wrote lately, then what it writes, until
    it ends. It is connected to by the first use, and for one event loop. Closing the handle
    leaves the terminal: `kill` ends it.
    """

    def __init__(self, sandbox: Handle, info: TerminalInfo) -> None:
        self.id = info.id
        self.info = info
        self._sandbox = sandbox
        self._path = f"/terminals/{part('terminal', info.id)}"
        self._line: Line | None = None
        self._connecting: asyncio.Lock | None = None

    @property
    def dropped(self) -> int:
        """How many bytes of output are lost, since nobody read them in time."""
        return 0 if self._line is None else self._line.dropped

    async def __anext__(self) -> bytes:
        piece = await (await self._connected()).read()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def write(self, data: str | bytes) -> None:
        """Type. Waits while the program does not read, and much is waiting for it."""
        content = encode_option("data", data)
        await (await self._connected()).write(content)

    async def resize(self, *, cols: int, rows: int) -> None:
        """Have it be of another size, which the program is told by SIGWINCH."""
        await (await self._connected()).resize(cols, rows)

    async def wait(self, timeout: float | None = None) -> int:
        """The exit code of its program, once it has one."""
        line = await self._connected()
        if (seconds := check_timeout(timeout)) is None:
            return await line.wait()
        async with deadline(seconds, f"the end of terminal {self.id}"):
            return await line.wait()

    async def refresh(self) -> TerminalInfo:
        """What is known of it at this moment, which is in `info` from then on."""
        self.info = await self._sandbox._ask(TerminalInfo, "GET", self._path)
        return self.info

    async def kill(self) -> None:
        """End it with everything in it, and forget it."""
        await self.aclose()
        await self._sandbox._ask(type(None), "DELETE", self._path, timeout=None)

    async def aclose(self) -> None:
        """Leave it; the program runs on. The next use connects again."""
        line, self._line = self._line, None
        if line is not None:
            await line.aclose()

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<Terminal {self.id!r} of sandbox {self._sandbox.id!r}>"

    async def _connected(self) -> Line:
        if self._line is not None:
            return self._line
        self._connecting = self._connecting or asyncio.Lock()
        async with self._connecting:
            if self._line is None:
                self._line = await self._connect()
        return self._line

    async def _connect(self) -> Line:
        line = Line(self._sandbox._socket(self._path, heartbeat=wire.SILENCE / 2))
        try:
            await line.open()
        except Refused as error:
            # A refusal has no body here: ask again in a way that has.
            await self.refresh()
            raise ServiceUnavailable(
                f"terminal {self.id} cannot be connected to: {error}.",
                hint="Is there a proxy on the way that does not know WebSockets?",
                service="server",
            ) from error
        return line
