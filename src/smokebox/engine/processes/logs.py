"""The logs of a background process: two files that its supervisor fills, read behind a cursor.

A cursor is the offset in both files. Offsets never change: the dropped beginning of a long log is
a hole in the file.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
from typing import TYPE_CHECKING, Self

from smokebox.engine.inotify import InotifyWatch, watch_log
from smokebox.engine.jail.log_pump import KEEP
from smokebox.errors import InvalidOption
from smokebox.types import LogChunk, ProcessLogs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from smokebox.types import Stream

SUFFIXES: dict[Stream, str] = {"stdout": ".out", "stderr": ".err"}
# The most bytes of one stream that `ProcessLog.read` returns.
MAX_TEXT = 16 << 20

_LAST_BYTES, _LAST_LINES = 2048, 5
_READ = 1 << 18
_CHUNKS_PER_TURN = 4
_CURSOR = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


class Notifier:
    """Wakes all waiting tasks. To miss nothing, take `event`, then check, then wait for it."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def notify(self) -> None:
        """Set the current event and replace it."""
        self.event.set()
        self.event = asyncio.Event()


class ProcessLog:
    """The two log files of one process. `changed` notifies of output and of the end."""

    def __init__(self, stem: str) -> None:
        self.changed = Notifier()
        self.finished = False
        self._paths = {stream: stem + suffix for stream, suffix in SUFFIXES.items()}
        self._followers = 0
        self._watches: list[InotifyWatch] = []

    def path(self, stream: Stream) -> str:
        """Return the file of a stream."""
        return self._paths[stream]

    def finish(self) -> None:
        """Let followers stop once they have read everything: the process ended."""
        self.finished = True
        self.changed.notify()

    def read(self) -> ProcessLogs:
        """Return both streams as text, or the end of a long one. Blocks on the disk."""
        return ProcessLogs(
            stdout=tail(self.path("stdout"), MAX_TEXT), stderr=tail(self.path("stderr"), MAX_TEXT)
        )

    def last_lines(self) -> str:
        """Return the last lines of stderr, else of stdout. See `last_lines`."""
        return last_lines(self.path("stderr")) or last_lines(self.path("stdout"))

    def parse_cursor(self, cursor: str | None, *, replay: bool = True) -> dict[Stream, int]:
        """Return the offsets of a cursor; without one the beginning, or the present."""
        sizes = {stream: _size_of(path) for stream, path in self._paths.items()}
        if cursor is None:
            return dict.fromkeys(SUFFIXES, 0) if replay else sizes
        found = _CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None
        offsets = dict(zip(SUFFIXES, map(int, found.groups()), strict=True)) if found else {}
        if not found or any(offsets[stream] > size for stream, size in sizes.items()):
            raise InvalidOption(
                f"{cursor!r:.80} is not a cursor into this log.",
                hint="Pass the cursor of a chunk of the same process, or None.",
                option="cursor",
                value=cursor,
            )
        return offsets

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notify of output inside the block. All followers share two watches."""
        if not self._followers:
            self._watches = [self._watch(path) for path in self._paths.values()]
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                for watch in self._watches:
                    watch.close()

    async def follow(
        self, offsets: dict[Stream, int], *, follow: bool
    ) -> AsyncGenerator[LogChunk, None]:
        """Yield output from the offsets on: the present output, or until the process ends."""
        with LogReader(self, offsets) as reader, contextlib.ExitStack() as stack:
            if follow:
                stack.enter_context(self.watched())
            count = 0
            while True:
                changed = self.changed.event
                last = self.finished or not follow
                if last:
                    reader.stop_at_present()
                while chunk := await reader.next(final=self.finished and last):
                    yield chunk
                    count += 1
                    # A program that never stops writing would starve the event loop.
                    if count % _CHUNKS_PER_TURN == 0:
                        await asyncio.sleep(0)
                if last:
                    return
                await changed.wait()

    def _watch(self, path: str) -> InotifyWatch:
        fd = _open(path)
        try:
            return watch_log(fd, lambda _: self.changed.notify())
        finally:
            os.close(fd)


class LogReader:
    """Reads both files of a log as text, in turns."""

    def __init__(self, log: ProcessLog, offsets: dict[Stream, int]) -> None:
        self._files = {stream: _open(log.path(stream)) for stream in SUFFIXES}
        self._turns: list[Stream] = list(SUFFIXES)
        self._offsets = dict(offsets)
        self._stops: dict[Stream, int] = {}
        self._buffer = bytearray(_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)

    @property
    def cursor(self) -> str:
        """The position in both files."""
        return f"{self._offsets['stdout']}-{self._offsets['stderr']}"

    def stop_at_present(self) -> None:
        """Return no output that is written after this call."""
        self._stops = {stream: self._size(stream) for stream in SUFFIXES}

    async def next(self, *, final: bool) -> LogChunk | None:
        """Return the next chunk of either stream, if there is one.

        With `final`, an incomplete character at the end is included, as nothing can complete it.
        """
        for stream in tuple(self._turns):
            if chunk := await self._next_of(stream, final):
                self._turns.remove(stream)
                self._turns.append(stream)
                return chunk
        return None

    async def _next_of(self, stream: Stream, final: bool) -> LogChunk | None:
        size, offset = self._size(stream), self._offsets[stream]
        if size < offset:
            return self._skip(stream, size)
        fd = self._files[stream]
        if size - offset > KEEP and (start := find_data(fd, offset, size)) > offset:
            return self._skip(stream, _find_character(fd, start))
        data = await self._read(fd, min(_READ, size - offset), offset)
        at_end = final and offset + len(data) >= size
        text, used = codecs.utf_8_decode(data, "replace", at_end)
        if not used:
            return None
        self._offsets[stream] += used
        return LogChunk(stream=stream, data=text, cursor=self.cursor)

    async def _read(self, fd: int, count: int, offset: int) -> memoryview | bytes:
        """Read from the page cache directly, and from the disk in a thread."""
        view = memoryview(self._buffer)[:count]
        try:
            return view[: os.preadv(fd, [view], offset, os.RWF_NOWAIT)]
        except BlockingIOError:
            return await asyncio.to_thread(os.pread, fd, count, offset)
        except OSError:
            # The file system does not support RWF_NOWAIT.
            return os.pread(fd, count, offset)

    def _skip(self, stream: Stream, start: int) -> LogChunk:
        dropped = max(0, start - self._offsets[stream])
        self._offsets[stream] = start
        what = f"{dropped} bytes of {stream} were dropped" if dropped else f"{stream} was cut"
        return LogChunk(
            stream=stream, data=f"[smokebox: {what}]\n", cursor=self.cursor, dropped=dropped
        )

    def _size(self, stream: Stream) -> int:
        size = os.fstat(self._files[stream]).st_size
        return min(size, self._stops.get(stream, size))


def tail(path: str, limit: int) -> str:
    """Return the last bytes of a log as text, after a line that counts the bytes left out."""
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        start = max(0, size - limit)
        if start:
            start = _find_character(fd, find_data(fd, start, size))
        data = os.pread(fd, size - start, start)
    finally:
        os.close(fd)
    text = data.decode("utf-8", "replace")
    return f"[smokebox: {start} bytes before this are left out]\n{text}" if start else text


def last_lines(path: str) -> str:
    """Return the end of a log in one line, without control characters."""
    lines = tail(path, _LAST_BYTES).splitlines()[-_LAST_LINES:]
    text = " | ".join(line.strip() for line in lines if line.strip())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def find_data(fd: int, offset: int, size: int) -> int:
    """Return the first offset from `offset` on that is not in a hole."""
    try:
        return min(size, os.lseek(fd, offset, os.SEEK_DATA))
    except OSError:
        return size


def _find_character(fd: int, offset: int) -> int:
    """Return the first offset from `offset` on where a UTF-8 character begins."""
    for byte in os.pread(fd, 3, offset):
        if byte & 0xC0 != 0x80:
            break
        offset += 1
    return offset


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
