"""Output of a command: bounded in memory, complete on disk, decoded without cut characters."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.runtime.spill import Spill, SpillFolder
    from smokebox.types import Stream

MAX_OUTPUT = 16 << 20
FLUSH_SIZE = 4 << 20
# Larger output is decoded in a thread, piece by piece: each keeps the interpreter.
PIECE_SIZE = 256 << 10
_LONGEST_CHARACTER = 4


class Decoder:
    """Incremental UTF-8 decoder. Invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Decode `data`, up to an incomplete character at its end."""
        return self._decoder.decode(data)

    @property
    def pending(self) -> int:
        """Number of bytes of the incomplete character at the end."""
        return len(self._decoder.getstate()[0])

    def finish(self) -> str:
        """Decode the incomplete character at the end of the stream."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStream:
    """One stream at its end: the text that was kept, and the file with all of it, if any."""

    text: str
    truncated: bool = False
    file: str | None = None


class Output:
    """Collects one stream: all of it up to `limit` bytes, beyond that its head and its tail.

    Beyond the limit, `truncated` is True and the whole stream goes to a file in `folder`. `feed`
    never touches the disk; `flush` does, and belongs in a thread. On a full disk only the file
    is lost.
    """

    def __init__(self, folder: SpillFolder, limit: int = MAX_OUTPUT) -> None:
        self._folder = folder
        self._head_limit = limit // 2
        self._limit = limit
        self._size = 0
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._unflushed: list[bytes] = []
        self._unflushed_size = 0
        self._spill: Spill | None = None
        self.truncated = False

    @property
    def slow(self) -> bool:
        """True if `finish` takes long, and belongs in a thread."""
        return self.truncated or self._size > PIECE_SIZE

    @property
    def needs_flush(self) -> bool:
        """True if `flush` should be called before the next `feed`."""
        return self._unflushed_size >= FLUSH_SIZE

    def feed(self, data: bytes) -> None:
        """Add bytes of the stream."""
        self._size += len(data)
        if not self.truncated:
            self._head.append(data)
            if self._size > self._limit:
                self._overflow()
            return
        self._queue_for_flush(data)
        self._append_to_tail(data)

    def flush(self) -> None:
        """Write pending bytes to the file. Blocks, and never fails."""
        data, self._unflushed, self._unflushed_size = self._unflushed, [], 0
        if self._spill is not None and not self._spill.write(data):
            self._spill = None

    def finish(self) -> CapturedStream:
        """Return the stream as text, with a marker line in place of omitted bytes."""
        if not self.truncated and len(self._head) <= 1:
            return CapturedStream(text=b"".join(self._head).decode("utf-8", "replace"))
        decoder = Decoder()
        texts = [decoder.feed(piece) for piece in self._head]
        if not self.truncated:
            return CapturedStream(text="".join((*texts, decoder.finish())))
        self.flush()
        file = None
        if self._spill is not None:
            self._spill.finish()
            file = self._spill.shown_path
        tail = self._trimmed_tail()
        kept = self._head_limit - decoder.pending + sum(map(len, tail))
        texts.append(_marker(self._size - kept, file))
        decoder = Decoder()
        texts += [decoder.feed(piece) for piece in tail]
        return CapturedStream(text="".join((*texts, decoder.finish())), truncated=True, file=file)

    def abandon(self) -> None:
        """Remove the file; the result is no longer needed."""
        if self._spill is not None:
            self._folder.discard(self._spill)
            self._spill = None

    def _overflow(self) -> None:
        self.truncated = True
        with contextlib.suppress(OSError):
            self._spill = self._folder.open()
        everything, self._head = self._head, []
        left = self._head_limit
        for data in everything:
            self._queue_for_flush(data)
            if left:
                self._head.append(data[:left])
            if left < len(data):
                self._append_to_tail(data[left:])
            left = max(0, left - len(data))

    def _queue_for_flush(self, data: bytes) -> None:
        if self._spill is not None:
            self._unflushed.append(data)
            self._unflushed_size += len(data)

    def _append_to_tail(self, data: bytes) -> None:
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._limit - self._head_limit:
            self._tail_size -= len(self._tail.popleft())

    def _trimmed_tail(self) -> list[bytes]:
        """Return the tail within the limit, without an incomplete character at its start."""
        first, *others = self._tail
        first = first[self._tail_size - (self._limit - self._head_limit) :]
        while others and len(first) < _LONGEST_CHARACTER:
            first += others.pop(0)
        return [_trim_start(first), *others]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedOutput:
    """Both streams of a command at its end."""

    stdout: CapturedStream
    stderr: CapturedStream


class Collector:
    """Collects both streams of a command. Files are written in a thread meanwhile."""

    def __init__(self, folder: SpillFolder, limit: int = MAX_OUTPUT) -> None:
        self._outputs: dict[Stream, Output] = {
            "stdout": Output(folder, limit),
            "stderr": Output(folder, limit),
        }
        self._flushing: asyncio.Future[None] | None = None

    async def feed(self, stream: Stream, data: bytes) -> None:
        """Add bytes of a stream. Waits only if the disk does not keep up."""
        output = self._outputs[stream]
        output.feed(data)
        if output.needs_flush:
            await self._wait_for_flush()
            self._flushing = asyncio.get_running_loop().run_in_executor(None, output.flush)

    async def finish(self) -> CapturedOutput:
        """Return both streams as text."""
        await self._wait_for_flush()
        stdout, stderr = [await self._finish(output) for output in self._outputs.values()]
        return CapturedOutput(stdout=stdout, stderr=stderr)

    def abandon(self) -> None:
        """Remove the files; the result is no longer needed."""
        for output in self._outputs.values():
            output.abandon()

    async def _wait_for_flush(self) -> None:
        if self._flushing is not None:
            await self._flushing
            self._flushing = None

    @staticmethod
    async def _finish(output: Output) -> CapturedStream:
        return await asyncio.to_thread(output.finish) if output.slow else output.finish()


def _marker(count: int, file: str | None) -> str:
    where = f"the whole stream is in {file}" if file else "the whole stream was not kept"
    return f"\n[smokebox: {count} bytes left out here; {where}]\n"


def _trim_start(data: bytes) -> bytes:
    """Remove an incomplete character at the start."""
    start = 0
    while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]
