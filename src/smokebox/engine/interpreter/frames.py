"""Frames that a kernel writes, one JSON object per line, to the log that its supervisor fills.

All of them come from inside the sandbox, where code can write anything in the kernel's place.
Lines are bounded, and invalid ones are skipped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from binascii import Error as NotBase64
from binascii import a2b_base64
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.engine.inotify import watch_end
from smokebox.engine.jail.log_pump import KEEP
from smokebox.engine.processes.logs import Notifier, find_data
from smokebox.types import CodeError, CodeResult, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_LINE = 40 << 20
_READ = 1 << 18
# Levels of nesting that a result gets on its way to a client.
_NESTING = 100

CHART = "application/vnd.smokebox.chart+json"
_TEXTS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "text/latex": "latex",
    "application/javascript": "javascript",
}
_BYTES = {"image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf"}


class KernelFrame(msgspec.Struct, kw_only=True, tag_field="type"):
    """A frame. `id` is that of the execution that it belongs to; `size` is set by the reader."""

    id: str = ""
    size: int = 0


class KernelReady(KernelFrame, tag="ready"):
    """The kernel accepts code."""


class KernelOutput(KernelFrame, tag="output"):
    """A piece of the code's output."""

    stream: Stream
    data: str


class KernelResult(KernelFrame, tag="result"):
    """A value that the code displayed, by MIME type."""

    data: dict[str, Any]
    main: bool = False

    def to_result(self) -> CodeResult:
        """Convert the frame for users, without the formats that are not valid."""
        fields: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for mime, value in self.data.items():
            if mime in _TEXTS and isinstance(value, str):
                fields[_TEXTS[mime]] = value
            elif mime in _BYTES and isinstance(value, str):
                with contextlib.suppress(NotBase64, ValueError):
                    fields[_BYTES[mime]] = a2b_base64(value)
            elif mime == "application/json":
                fields["json"] = value
            elif mime == CHART and isinstance(value, dict):
                fields["chart"] = value
            elif mime not in _TEXTS and mime not in _BYTES:
                rest[mime] = value
        return CodeResult(**fields, data=rest, main=self.main)


class KernelError(KernelFrame, tag="error"):
    """The error that ended the code."""

    name: str
    message: str
    traceback: str
    line: int | None = None

    def to_error(self) -> CodeError:
        """Convert the frame for users."""
        return CodeError(
            name=self.name, message=self.message, traceback=self.traceback, line=self.line
        )


class KernelEnd(KernelFrame, tag="end"):
    """The code ended. `count` is the number of executions so far."""

    count: int


class KernelDropped(KernelFrame, tag="dropped"):
    """Bytes that are missing or not valid. Made by the reader, never sent."""

    count: int


_decoder = msgspec.json.Decoder(KernelReady | KernelOutput | KernelResult | KernelError | KernelEnd)


class KernelListener:
    """An open log of a kernel. `changed` notifies of new frames."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.changed = Notifier()


class FrameReader:
    """Reads the frames of one kernel. It remembers its position between listeners."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._line: list[bytes] = []
        self._size = 0

    def skip(self) -> None:
        """Skip the frames so far: they were for another engine."""
        try:
            self._offset = os.stat(self._path).st_size
        except FileNotFoundError:
            self._offset = 0
        self._line, self._size = [], 0

    @contextlib.contextmanager
    def listen(self) -> Iterator[KernelListener]:
        """Open and watch the log inside the block, even if it is unlinked meanwhile."""
        fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            listener = KernelListener(fd)
            watch = watch_end(fd, lambda _: listener.changed.notify())
            try:
                yield listener
            finally:
                watch.close()
        finally:
            os.close(fd)

    async def read(self, listener: KernelListener) -> list[KernelFrame]:
        """Return some of the complete frames that were not read yet; empty at the end."""
        while True:
            found = self._skip_hole(listener.fd)
            data = os.pread(listener.fd, _READ, self._offset)
            self._offset += len(data)
            found += self._feed(data)
            if found or not data:
                return found
            # A very long line must not block the event loop.
            await asyncio.sleep(0)

    def _skip_hole(self, fd: int) -> list[KernelFrame]:
        """Skip the part of a long log that was dropped before it was read."""
        size = os.fstat(fd).st_size
        if size - self._offset <= KEEP:
            return []
        start = find_data(fd, self._offset, size)
        dropped, self._offset = start - self._offset, start
        if not dropped:
            return []
        self._line, self._size = [], 0
        return [KernelDropped(count=dropped)]

    def _feed(self, data: bytes) -> list[KernelFrame]:
        *ends, rest = data.split(b"\n")
        found: list[KernelFrame] = []
        for end in ends:
            self._extend(end)
            found.append(self._finish())
        self._extend(rest)
        return found

    def _extend(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= LONGEST_LINE:
            self._line.append(data)
        else:
            self._line.clear()

    def _finish(self) -> KernelFrame:
        size, line = self._size, b"".join(self._line)
        self._line, self._size = [], 0
        if size > LONGEST_LINE:
            return KernelDropped(count=size)
        return parse(line)


def parse(line: bytes) -> KernelFrame:
    """Parse an untrusted line. An invalid one becomes `KernelDropped`."""
    try:
        frame: KernelFrame = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return KernelDropped(count=len(line))
    frame.size = len(line)
    if _can_encode(frame):
        return frame
    if not isinstance(frame, KernelResult):
        return KernelDropped(count=len(line))
    # Integers that are too large for msgspec, or lists nested too deeply.
    frame.data = {mime: value for mime, value in frame.data.items() if isinstance(value, str)}
    return frame


def _can_encode(frame: KernelFrame) -> bool:
    """Return whether the frame can be encoded again, nested in other objects."""
    nested: object = frame
    for _ in range(_NESTING):
        nested = [nested]
    try:
        msgspec.json.encode(nested)
    except (msgspec.MsgspecError, OverflowError, RecursionError):
        return False
    return True
