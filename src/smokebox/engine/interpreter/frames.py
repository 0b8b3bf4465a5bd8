"""What a kernel tells, line by line, in the log that its minder fills.

All of it comes from inside the sandbox, where code can say in the kernel's place whatever it
likes: lines are bounded, and what is no frame is passed over, and counted.
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
from smokebox.engine.processes.logs import Notifier
from smokebox.types import CodeError, CodeResult, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_LINE = 40 << 20
_READ = 1 << 18
# How much deeper than here a result is wherever it goes.
_DEEPER = 100

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
    """What all frames are: of one piece of code, whose id they repeat; `size` is counted here."""

    id: str = ""
    size: int = 0


class KernelReady(KernelFrame, tag="ready"):
    """The kernel takes code."""


class KernelOutput(KernelFrame, tag="output"):
    """A piece of what the code wrote."""

    stream: Stream
    data: str


class KernelResult(KernelFrame, tag="result"):
    """Something that the code showed, by MIME type."""

    data: dict[str, Any]
    main: bool = False


class KernelError(KernelFrame, tag="error"):
    """What the code ended with."""

    name: str
    message: str
    traceback: str
    line: int | None = None


class KernelEnd(KernelFrame, tag="end"):
    """The code is over; `count` is the how-manieth it was."""

    count: int


class KernelDropped(KernelFrame, tag="dropped"):
    """Made here, for bytes that are missing, or mean nothing."""

    count: int


Told = KernelReady | KernelOutput | KernelResult | KernelError | KernelEnd
_decoder = msgspec.json.Decoder(Told)


class KernelListener:
    """What listens to a kernel: its log, also when that has no name any more, and a bell."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bell = Notifier()


class FrameReader:
    """Reads the frames of one kernel, from where it was when it was last asked."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset = 0
        self._line: list[bytes] = []
        self._size = 0

    def skip(self) -> None:
        """Go on from what is told after this: the rest was for somebody else."""
        self._offset = _size(self._path)
        self._line, self._size = [], 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[KernelListener]:
        """While inside, the ear is told when there is more."""
        fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            ear = KernelListener(fd)
            watch = watch_end(fd, lambda _: ear.bell.ring())
            try:
                yield ear
            finally:
                watch.close()
        finally:
            os.close(fd)

    async def read(self, ear: KernelListener) -> list[KernelFrame]:
        """The frames that became whole since, some of them; none when all were given."""
        while True:
            found = self._leap(ear.fd)
            data = os.pread(ear.fd, _READ, self._offset)
            self._offset += len(data)
            found += self._take(data)
            if found or not data:
                return found
            # A very long line is read in turns with whatever else there is to do.
            await asyncio.sleep(0)

    def _leap(self, fd: int) -> list[KernelFrame]:
        """Leave out what is a hole by now: nobody read it for too long."""
        size = os.fstat(fd).st_size
        if size - self._offset <= KEEP:
            return []
        try:
            start = os.lseek(fd, self._offset, os.SEEK_DATA)
        except OSError:
            start = size
        dropped, self._offset = start - self._offset, start
        if not dropped:
            return []
        self._line, self._size = [], 0
        return [KernelDropped(count=dropped)]

    def _take(self, data: bytes) -> list[KernelFrame]:
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
    """What a line from inside means; `KernelDropped` for one that means nothing."""
    try:
        frame: KernelFrame = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return KernelDropped(count=len(line))
    frame.size = len(line)
    if _can_be_sent(frame):
        return frame
    if not isinstance(frame, KernelResult):
        return KernelDropped(count=len(line))
    # Numbers that JSON has and programs have not, or lists in lists without end.
    frame.data = {mime: value for mime, value in frame.data.items() if isinstance(value, str)}
    return frame


def _can_be_sent(frame: KernelFrame) -> bool:
    """Whether somebody can write down again what we have read, also within other things."""
    within: object = frame
    for _ in range(_DEEPER):
        within = [within]
    try:
        msgspec.json.encode(within)
    except (msgspec.MsgspecError, OverflowError, RecursionError):
        return False
    return True


def result_of(frame: KernelResult) -> CodeResult:
    """A bundle by its fields; what cannot be in one is left out."""
    fields: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for mime, value in frame.data.items():
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
    return CodeResult(**fields, data=rest, main=frame.main)


def error_of(frame: KernelError) -> CodeError:
    """An error as its users see it."""
    return CodeError(
        name=frame.name, message=frame.message, traceback=frame.traceback, line=frame.line
    )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
