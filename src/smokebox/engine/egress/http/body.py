"""The body of a message on a wire, read piece by piece, and written again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from smokebox.engine.egress.http.head import Framing, Malformed
from smokebox.engine.egress.http.wire import Cut, Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_PIECE = 128 * 1024
_MOST_LINE = 4096
_MOST_TRAILERS = 16 * 1024
# A size, and extensions that nobody reads, but without what other readers stumble over.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class Incoming:
    """What a framing makes of the bytes on a wire.

    `expected` says that the sender waits for a word before it begins. `count` is told the
    size of each piece, and may raise to have no more.
    """

    def __init__(
        self,
        wire: Wire,
        framing: Framing,
        *,
        expected: bool = False,
        count: Callable[[int], None] | None = None,
    ) -> None:
        self.framing = framing
        self.done = framing == 0
        self.broken = False
        self.expected = expected and not self.done
        self.size = 0
        self._wire = wire
        self._count = count
        self._left = framing if isinstance(framing, int) else 0
        self._open = False

    async def read(self) -> bytes:
        """The next piece, or nothing; at the end `done`. Raises `Cut` where that is missing."""
        if self.done:
            return b""
        if self.expected:
            self.welcome()
        try:
            piece = await self._piece()
        except Malformed:
            self.broken = True
            raise
        self.size += len(piece)
        if self._count is not None:
            self._count(len(piece))
        return piece

    async def _piece(self) -> bytes:
        if self.framing == "chunked":
            return await self._chunked()
        if self.framing == "close":
            piece = await self._wire.some(_PIECE)
            self.done = not piece
        else:
            piece = await self._counted()
            self.done = self._left == 0
        return piece

    def welcome(self) -> None:
        """Tell the sender to begin, where it waits for that."""
        self.expected = False
        if not self.done and not self._wire.waiting:
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def ready(self) -> bool:
        """Whether the next piece is here already."""
        return self.done or (self._wire.waiting > 0 and not self.expected)

    @property
    def whole(self) -> bool:
        """Whether all of it is here already, and short."""
        if self.expected or not isinstance(self.framing, int):
            return False
        return self._left <= min(self._wire.waiting, _PIECE)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self.done:
            if piece := await self.read():
                yield piece

    async def _counted(self) -> bytes:
        piece = await self._wire.some(min(self._left, _PIECE))
        if not piece:
            raise Cut("the other side left in the middle of a body")
        self._left -= len(piece)
        return piece

    async def _chunked(self) -> bytes:
        """All chunks that are here, so that a small one costs no turn of the loop."""
        pieces: list[bytes] = []
        size = 0
        while size < _PIECE:
            if not self._left:
                if self._open and (not pieces or self._wire.waiting > 1):
                    await self._close_chunk()
                if pieces and (self._open or not self._wire.has_line):
                    break
                self._left = await self._next_size()
                self._open = True
                if not self._left:
                    await self._trailers()
                    self.done = True
                    break
            elif pieces and not self._wire.waiting:
                break
            pieces.append(await self._counted())
            size += len(pieces[-1])
        return b"".join(pieces)

    async def _close_chunk(self) -> None:
        if await self._wire.exactly(2) != b"\r\n":
            raise Malformed("a chunk does not end where it said")
        self._open = False

    async def _next_size(self) -> int:
        found = _SIZE.fullmatch(await self._wire.line(_MOST_LINE))
        if found is None:
            raise Malformed("the size of a chunk is not a number")
        return int(found[1], 16)

    async def _trailers(self) -> None:
        """Read and drop them: they come too late to be judged."""
        left = _MOST_TRAILERS
        while line := await self._wire.line(_MOST_LINE):
            left -= len(line) + 2
            if left < 0 or not _TRAILER.fullmatch(line):
                raise Malformed("the trailers of the message are not headers")


class Outgoing:
    """Writes a head and a body, with as few writes as there can be."""

    def __init__(self, wire: Wire, head: bytes, *, chunked: bool) -> None:
        self._wire = wire
        self._head = head
        self._chunked = chunked

    def flush(self) -> None:
        """Send the head, where it waits for something to go with it."""
        if self._head:
            head, self._head = self._head, b""
            self._wire.write(head)

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body, as fast as it is taken."""
        if not piece:
            return
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        head, self._head = self._head, b""
        self._wire.write(head + piece if head else piece)
        await self._wire.drain()

    async def finish(self, last: bytes = b"") -> None:
        """The last piece, and the end."""
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        head, self._head = self._head, b""
        if head or last:
            self._wire.write(head + last)
            await self._wire.drain()
