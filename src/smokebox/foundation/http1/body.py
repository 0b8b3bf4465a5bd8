"""Bodies of messages: read piece by piece from a connection, and written to one."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Protocol

from smokebox.foundation.http1.connection import HIGH_WATER, Connection, ConnectionLost
from smokebox.foundation.http1.head import Framing, MalformedMessage
from smokebox.foundation.loop_shares import pause

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_MAX_LINE = 4096
_MAX_TRAILERS = 16 * 1024
# Bytes around the chunks of a body: these for each chunk, and these more in all.
_CHUNK_OVERHEAD = 16
_MAX_OVERHEAD = 16 * 1024
# Decoding takes 2 us a chunk: after many in one read, others have a turn, and the next is shorter.
_MANY_CHUNKS = 64
_LONG_READ, _SHORT_READ = 64 * 1024, 8 * 1024
# A size and extensions, which are ignored, without characters that confuse other parsers.
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class ChunkDecoder:
    """Decodes a chunked body from bytes as they arrive, without I/O.

    `done` is True after the last byte of the body, and `rest` holds the bytes that follow it.
    `pieces` is the number of chunks in the bytes that were fed last.
    """

    def __init__(self) -> None:
        self.done = False
        self.rest = b""
        self.pieces = _MANY_CHUNKS
        self._remaining = 0
        self._partial = b""
        self._at_chunk_end = False
        self._in_trailers = False
        self._trailers_left = _MAX_TRAILERS
        self._overhead = 0

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in `data`, which may be empty.

        Raises:
            MalformedMessage: The chunks are not valid.
        """
        if self._partial:
            data, self._partial = self._partial + data, b""
        pieces: list[bytes] = []
        position, size = 0, len(data)
        while not self.done and (position < size):
            if self._remaining:
                piece = data[position : position + self._remaining]
                pieces.append(piece)
                position += len(piece)
                self._remaining -= len(piece)
                self._at_chunk_end = not self._remaining
            elif self._at_chunk_end:
                ending = data[position : position + 2]
                if not b"\r\n".startswith(ending):
                    raise MalformedMessage("a chunk does not end where it said")
                if len(ending) < 2:
                    self._partial = ending
                    break
                position += 2
                self._at_chunk_end = False
            else:
                end = data.find(b"\n", position) + 1
                if not end:
                    self._keep_partial(data[position:])
                    break
                self._read_line(data[position:end])
                position = end
        if self.done:
            self.rest = data[position:]
        self.pieces = len(pieces)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _keep_partial(self, line: bytes) -> None:
        if len(line) > _MAX_LINE:
            raise MalformedMessage(f"a line is longer than {_MAX_LINE} bytes")
        self._partial = line

    def _read_line(self, line: bytes) -> None:
        """Read the size of a chunk, or drop a trailer: it arrives too late to be checked."""
        if len(line) > _MAX_LINE or not line.endswith(b"\r\n"):
            raise MalformedMessage("a line does not end as it should")
        if not self._in_trailers:
            match = _CHUNK_SIZE.fullmatch(line[:-2])
            if match is None:
                raise MalformedMessage("the size of a chunk is not a number")
            self._overhead += max(0, len(line) - _CHUNK_OVERHEAD)
            if self._overhead > _MAX_OVERHEAD:
                raise MalformedMessage("the chunks of the message have too many extensions")
            self._remaining = int(match[1], 16)
            self._in_trailers = not self._remaining
        elif line == b"\r\n":
            self.done = True
        else:
            self._trailers_left -= len(line)
            if self._trailers_left < 0 or not _TRAILER.fullmatch(line[:-2]):
                raise MalformedMessage("the trailers of the message are not headers")


class PieceReader(Protocol):
    """A body that is read piece by piece until it is `done`."""

    @property
    def done(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    async def read(self) -> bytes: ...


class BodyReader:
    """Reads one body from a connection.

    Args:
        expects_continue: The sender waits for `100 Continue`, which the first read sends.
        count: Called with the size of each piece; may raise to stop reading.
    """

    def __init__(
        self,
        connection: Connection,
        framing: Framing,
        *,
        expects_continue: bool = False,
        count: Callable[[int], None] | None = None,
    ) -> None:
        self.framing = framing
        self.done = framing == 0
        self.malformed = False
        self.expects_continue = expects_continue and not self.done
        self.size = 0
        self._connection = connection
        self._count = count
        self._remaining = framing if isinstance(framing, int) else 0
        self._chunks = ChunkDecoder() if framing == "chunked" else None

    async def read(self) -> bytes:
        """Read the next piece, which may be empty; `done` is True after the last.

        Raises:
            ConnectionLost: The peer closed the connection before the end of the body.
            MalformedMessage: The chunks are not valid.
        """
        if self.done:
            return b""
        if self.expects_continue:
            self.send_continue()
        try:
            piece = await self._read_piece()
        except MalformedMessage:
            self.malformed = True
            raise
        self.size += len(piece)
        if self._count is not None:
            self._count(len(piece))
        return piece

    def send_continue(self) -> None:
        """Tell the sender to start, if it waits for that."""
        self.expects_continue = False
        if not self.done and not self._connection.buffered:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def ready(self) -> bool:
        """True if reading the next piece does not wait."""
        return self.done or (self._connection.buffered > 0 and not self.expects_continue)

    @property
    def whole(self) -> bool:
        """True if the whole body is short and in the buffer already."""
        if self.expects_continue or not isinstance(self.framing, int):
            return False
        return self._remaining <= min(self._connection.buffered, HIGH_WATER)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self.done:
            if piece := await self.read():
                yield piece

    async def discard(self, *, limit: int | None = None, seconds: float) -> None:
        """Read and drop the rest, so that closing does not destroy a response on its way.

        Stops without an error after `limit` bytes in all or `seconds`.
        """
        with contextlib.suppress(TimeoutError, MalformedMessage, ConnectionLost):
            async with asyncio.timeout(seconds):
                while not (self.done or self.malformed or self.expects_continue):
                    await self.read()
                    if self._connection.ended or (limit is not None and self.size > limit):
                        return

    async def _read_piece(self) -> bytes:
        if self._chunks is not None:
            return await self._read_chunks(self._chunks)
        # Bytes after the body stay in the connection, where the next head is read from.
        counted = self.framing != "close"
        limit = min(self._remaining, HIGH_WATER) if counted else HIGH_WATER
        piece = await self._connection.read(limit)
        if not piece:
            self._end_with_connection()
        elif counted:
            self._remaining -= len(piece)
            self.done = not self._remaining
        return piece

    async def _read_chunks(self, chunks: ChunkDecoder) -> bytes:
        while True:
            small = chunks.pieces >= _MANY_CHUNKS
            if small and self.size:
                await asyncio.sleep(0)
            data = await self._connection.read(_SHORT_READ if small else _LONG_READ)
            if not data:
                self._end_with_connection()
            piece = chunks.feed(data)
            if chunks.done:
                self.done = True
                self._connection.put_back(chunks.rest)
            if piece or self.done:
                return piece

    def _end_with_connection(self) -> None:
        if self.framing != "close":
            raise ConnectionLost("the peer closed the connection in the middle of a body")
        if self._connection.error is not None:
            raise ConnectionLost("the connection broke in the middle of a body")
        self.done = True


class BodyWriter:
    """Writes a head and a body in as few writes as possible."""

    def __init__(self, connection: Connection, head: bytes, *, chunked: bool) -> None:
        self._connection = connection
        self._head = head
        self._chunked = chunked

    def flush(self) -> None:
        """Send the head, if it was not sent yet."""
        if self._head:
            head, self._head = self._head, b""
            self._connection.write(head)

    async def write(self, piece: bytes) -> None:
        """Send a piece, as fast as the peer takes it."""
        if not piece:
            return
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        head, self._head = self._head, b""
        self._connection.write(head + piece if head else piece)
        await self._connection.drain()

    async def finish(self, last: bytes = b"") -> None:
        """Send the last piece and the end of the body."""
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        head, self._head = self._head, b""
        if head or last:
            self._connection.write(head + last)
            await self._connection.drain()


async def relay_body(
    source: PieceReader,
    writer: BodyWriter,
    transform: Callable[[bytes, bool], bytes] | None = None,
) -> None:
    """Write all pieces of `source` to `writer` as they arrive.

    Args:
        transform: Called with each piece and whether it is the last; returns what to send.
    """
    if not source.ready:
        writer.flush()
    while True:
        await pause()
        piece = await source.read()
        if transform is not None:
            piece = transform(piece, source.done)
        if source.done:
            await writer.finish(piece)
            return
        await writer.write(piece)
