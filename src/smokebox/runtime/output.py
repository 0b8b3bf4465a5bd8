"""The output of a command: bounded in memory, whole on disk, decoded at the edge."""

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


class Decoder:
    """Bytes to text as they come, never cut inside a character.

    What is not UTF-8 becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text of `data`, less a character that is not whole yet."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was held back, once there is no more to come."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One stream at its end: the text that was kept, and the file with all of it, if any."""

    text: str
    truncated: bool = False
    file: str | None = None


class Output:
    """Collects one stream: all of it up to `limit` bytes, beyond that its head and its tail.

    What is beyond goes to a file in `folder`. `feed` never touches the disk; when `due`
    there is enough waiting for `flush`, which does and belongs in a thread. A disk that
    is full costs the file, and nothing else. `truncated` once the limit was passed.
    """

    def __init__(self, folder: SpillFolder, limit: int = MAX_OUTPUT) -> None:
        self._folder = folder
        self._head_limit = limit // 2
        self._limit = limit
        self._size = 0
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._spill: Spill | None = None
        self.truncated = False

    @property
    def due(self) -> bool:
        """Whether `flush` should be called before more is fed."""
        return self._waiting_size >= FLUSH_SIZE

    def feed(self, data: bytes) -> None:
        """Take more of the stream."""
        self._size += len(data)
        if not self.truncated:
            self._head.append(data)
            if self._size > self._limit:
                self._overflow()
            return
        self._wait_for_flush(data)
        self._keep_tail(data)

    def flush(self) -> None:
        """Write what waits to the file. Blocks, and never fails."""
        data, self._waiting, self._waiting_size = self._waiting, [], 0
        if self._spill is not None and not self._spill.write(data):
            self._spill = None

    def finish(self) -> Captured:
        """The stream as text, with a marker line where something was left out."""
        if not self.truncated:
            return Captured(text=b"".join(self._head).decode("utf-8", "replace"))
        self.flush()
        if self._spill is not None:
            self._spill.finish()
        file = self._spill.shown if self._spill is not None else None
        head = _whole_end(self._head[0])
        tail = _whole_start(b"".join(self._tail)[-(self._limit - self._head_limit) :])
        text = head.decode("utf-8", "replace")
        text += _marker(self._size - len(head) - len(tail), file)
        return Captured(text=text + tail.decode("utf-8", "replace"), truncated=True, file=file)

    def abandon(self) -> None:
        """Remove the file of a command that nobody waits for any more."""
        if self._spill is not None:
            self._folder.discard(self._spill)
            self._spill = None

    def _overflow(self) -> None:
        self.truncated = True
        everything = b"".join(self._head)
        self._head = [everything[: self._head_limit]]
        with contextlib.suppress(OSError):
            self._spill = self._folder.open()
        self._wait_for_flush(everything)
        self._keep_tail(everything[self._head_limit :])

    def _wait_for_flush(self, data: bytes) -> None:
        if self._spill is not None:
            self._waiting.append(data)
            self._waiting_size += len(data)

    def _keep_tail(self, data: bytes) -> None:
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._limit - self._head_limit:
            self._tail_size -= len(self._tail.popleft())


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Both streams of a command at its end."""

    stdout: Captured
    stderr: Captured


class Collector:
    """Collects both streams of a command. Files are written in a thread while more is read."""

    def __init__(self, folder: SpillFolder, limit: int = MAX_OUTPUT) -> None:
        self._outputs: dict[Stream, Output] = {
            "stdout": Output(folder, limit),
            "stderr": Output(folder, limit),
        }
        self._flushing: asyncio.Future[None] | None = None

    async def feed(self, stream: Stream, data: bytes) -> None:
        """Take more of a stream; waits only for a disk that does not keep up."""
        output = self._outputs[stream]
        output.feed(data)
        if output.due:
            await self._flushed()
            self._flushing = asyncio.get_running_loop().run_in_executor(None, output.flush)

    async def finish(self) -> Collected:
        """Both streams as text."""
        await self._flushed()
        stdout, stderr = [await self._finish(output) for output in self._outputs.values()]
        return Collected(stdout=stdout, stderr=stderr)

    def abandon(self) -> None:
        """Remove the files of a command that nobody waits for any more."""
        for output in self._outputs.values():
            output.abandon()

    async def _flushed(self) -> None:
        if self._flushing is not None:
            await self._flushing
            self._flushing = None

    @staticmethod
    async def _finish(output: Output) -> Captured:
        return await asyncio.to_thread(output.finish) if output.truncated else output.finish()


def _marker(count: int, file: str | None) -> str:
    where = f"the whole stream is in {file}" if file else "the whole stream was not kept"
    return f"\n[smokebox: {count} bytes left out here; {where}]\n"


def _whole_end(data: bytes) -> bytes:
    """`data` without a last character that was cut."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if width > back else data
        if byte < 0x80:
            break
    return data


def _whole_start(data: bytes) -> bytes:
    """`data` without a first character that was cut."""
    start = 0
    while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]
