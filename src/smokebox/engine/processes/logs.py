"""The logs of a lasting process: two files that it fills by itself, read behind a cursor.

A cursor is how far both files were read. Offsets never change, also where the older part of
a long log is gone: it is a hole in the file.
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
# The most of one stream that `read_logs` gives.
MOST_TEXT = 16 << 20

_LAST_BYTES, _LAST_LINES = 2048, 5
_READ = 1 << 18
_CHUNKS_PER_TURN = 4
_CURSOR = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


class Notifier:
    """Wakes all who listen. Listen first, then look, then wait: so nothing is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """What the next ring will set."""
        return self._event

    def ring(self) -> None:
        """Wake everybody."""
        self._event.set()
        self._event = asyncio.Event()


class ProcessLog:
    """The two files of one process, and the bell that rings when there is more in them."""

    def __init__(self, stem: str) -> None:
        self.bell = Notifier()
        self.over = False
        self._paths = {stream: stem + suffix for stream, suffix in SUFFIXES.items()}
        self._followers = 0
        self._watches: list[InotifyWatch] = []

    def path(self, stream: Stream) -> str:
        """The file of a stream."""
        return self._paths[stream]

    def finish(self) -> None:
        """Nothing more is to come: let followers end when they have all there is."""
        self.over = True
        self.bell.ring()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, the bell rings for what is written. Many share two watches."""
        if not self._followers:
            self._watches = [_watch(path, self.bell) for path in self._paths.values()]
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
        """What is written from the offsets on: to the end of the process, or what is there."""
        with LogReader(self, offsets) as reader, contextlib.ExitStack() as stack:
            if follow:
                stack.enter_context(self.watched())
            count = 0
            while True:
                heard = self.bell.listen()
                last = self.over or not follow
                if last:
                    reader.stop_at_present()
                while chunk := await reader.next(final=self.over and last):
                    yield chunk
                    count += 1
                    # A program that never stops writing would keep the loop to itself.
                    if count % _CHUNKS_PER_TURN == 0:
                        await asyncio.sleep(0)
                if last:
                    return
                await heard.wait()


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
        """How far it has read."""
        return f"{self._offsets['stdout']}-{self._offsets['stderr']}"

    def stop_at_present(self) -> None:
        """Give no more than there is at this moment."""
        self._stops = {stream: self._size(stream) for stream in SUFFIXES}

    async def next(self, *, final: bool) -> LogChunk | None:
        """The next piece of either stream, if there is one.

        With `final` also a character that is not whole, as nothing will complete it.
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
        if size - offset > KEEP and (start := _data(fd, offset, size)) > offset:
            return self._skip(stream, _character(fd, start))
        data = await self._read(fd, min(_READ, size - offset), offset)
        whole = final and offset + len(data) >= size
        text, used = codecs.utf_8_decode(data, "replace", whole)
        if not used:
            return None
        self._offsets[stream] += used
        return LogChunk(stream=stream, data=text, cursor=self.cursor)

    async def _read(self, fd: int, count: int, offset: int) -> memoryview | bytes:
        """Read at once what is in memory; for what is only on the disk, wait in a thread."""
        view = memoryview(self._buffer)[:count]
        try:
            return view[: os.preadv(fd, [view], offset, os.RWF_NOWAIT)]
        except BlockingIOError:
            return await asyncio.to_thread(os.pread, fd, count, offset)
        except OSError:
            # Not every file system can say.
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


def start_of(log: ProcessLog, cursor: str | None, *, replay: bool = True) -> dict[Stream, int]:
    """The offsets that a cursor stands for; without one the beginning, or the present."""
    sizes = {stream: _size_of(log.path(stream)) for stream in SUFFIXES}
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


def read_logs(log: ProcessLog) -> ProcessLogs:
    """Both streams as text. Blocks for as long as a disk takes."""
    return ProcessLogs(
        stdout=tail(log.path("stdout"), MOST_TEXT), stderr=tail(log.path("stderr"), MOST_TEXT)
    )


def tail(path: str, most: int) -> str:
    """The last bytes of a log as text, after a line that counts those before."""
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        start = max(0, size - most)
        if start:
            start = _character(fd, _data(fd, start, size))
        data = os.pread(fd, size - start, start)
    finally:
        os.close(fd)
    text = data.decode("utf-8", "replace")
    return f"[smokebox: {start} bytes before this are left out]\n{text}" if start else text


def _watch(path: str, bell: Notifier) -> InotifyWatch:
    fd = _open(path)
    try:
        return watch_log(fd, lambda _: bell.ring())
    finally:
        os.close(fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _data(fd: int, offset: int, size: int) -> int:
    """Where from `offset` on the file has data, and no hole."""
    try:
        return min(size, os.lseek(fd, offset, os.SEEK_DATA))
    except OSError:
        return size


def _character(fd: int, offset: int) -> int:
    """Where from `offset` on a character begins."""
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


def last_lines(path: str) -> str:
    """The end of a log in one line, with nothing in it that a terminal would obey."""
    lines = tail(path, _LAST_BYTES).splitlines()[-_LAST_LINES:]
    text = " | ".join(line.strip() for line in lines if line.strip())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
