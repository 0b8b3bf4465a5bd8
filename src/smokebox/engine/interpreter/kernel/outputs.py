"""What code prints: through sys.stdout, or past Python to the descriptors 1 and 2.

Both ways end in one list, in the order of writing, which goes out as frames: at once when
much is there, else a moment later. What is written while no code runs waits for the next.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .calm import Calm
    from .wire import Frames

STREAMS = {1: "stdout", 2: "stderr"}
# A frame that much is due at once; what is printed line by line is gathered for so long.
FULL = 1 << 15
GATHER_SECONDS = 0.004
# The most that is kept for the next code, of what is written while none runs.
MOST_IDLE = 1 << 16
_PIPE = 1 << 16


class Written(io.RawIOBase):
    """The bytes below sys.stdout or sys.stderr; its descriptor is for child processes."""

    def __init__(self, outputs: Outputs, fd: int) -> None:
        super().__init__()
        self._outputs = outputs
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> int:  # type: ignore[override]
        piece = bytes(data)
        self._outputs.put(self._fd, piece)
        return len(piece)

    def flush(self) -> None:
        if not self.closed:
            self._outputs.flush()


class Outputs:
    """Both streams of the kernel."""

    def __init__(self, frames: Frames, calm: Calm) -> None:
        self._frames = frames
        self._calm = calm
        self._lock = threading.RLock()
        self._pieces: list[tuple[int, bytes]] = []
        self._size = 0
        self._dropped = 0
        self._open = False
        self._dirty = threading.Event()
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {fd: make("replace") for fd in STREAMS}
        self._pipes = {_redirect(fd): fd for fd in STREAMS}
        self.bind()
        os.register_at_fork(after_in_child=_be_plain)
        for work in (self._listen, self._gather):
            threading.Thread(target=work, name="smokebox", daemon=True).start()

    def bind(self) -> None:
        """Have sys.stdout and sys.stderr be ours, whatever the last code put there."""
        for fd, name in STREAMS.items():
            stream = getattr(sys, name, None)
            ours = stream is not None and isinstance(getattr(stream, "buffer", None), Written)
            if not ours or getattr(stream, "closed", True):
                setattr(sys, name, _text(Written(self, fd)))

    def begin(self) -> None:
        """Code begins: what waited is its output too."""
        with self._calm, self._lock:
            self._open = True
            if self._dropped:
                note = f"[smokebox: {self._dropped} bytes before this are left out]\n"
                self._pieces.insert(0, (1, note.encode()))
                self._dropped = 0
            self._dirty.set()

    def end(self) -> None:
        """Code has ended: all that it wrote goes out."""
        with self._calm, self._lock:
            self.flush(last=True)
            self._open = False

    def put(self, fd: int, data: bytes) -> None:
        """Take what Python code wrote, after what was written past it before."""
        with self._calm, self._lock:
            self._drain()
            self._keep(fd, data)
            if self._size >= FULL:
                self.flush()
            self._dirty.set()

    def flush(self, last: bool = False) -> None:
        """Send what there is; with `last` also characters that are not whole."""
        with self._calm, self._lock:
            self._drain()
            if not self._open:
                return
            pieces, self._pieces, self._size = self._pieces, [], 0
            texts: list[tuple[int, str]] = []
            for fd, data in pieces:
                text = self._decoders[fd].decode(data)
                if texts and texts[-1][0] == fd:
                    texts[-1] = (fd, texts[-1][1] + text)
                else:
                    texts.append((fd, text))
            if last:
                texts += [(fd, one.decode(b"", True)) for fd, one in self._decoders.items()]
            for fd, text in texts:
                if text:
                    self._frames.send("output", stream=STREAMS[fd], data=text)

    def _keep(self, fd: int, data: bytes) -> None:
        self._pieces.append((fd, data))
        self._size += len(data)
        while not self._open and self._size > MOST_IDLE:
            size = len(self._pieces.pop(0)[1])
            self._size -= size
            self._dropped += size

    def _drain(self) -> None:
        """Take what is in the pipes, and no more than they can hold."""
        for pipe, fd in self._pipes.items():
            try:
                data = os.read(pipe, _PIPE)
            except (BlockingIOError, InterruptedError):
                continue
            if data:
                self._keep(fd, data)

    def _listen(self) -> None:
        """Hear what is written past Python, while Python is busy or waits."""
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe, select.POLLIN)
        while True:
            poll.poll()
            with self._lock:
                self._drain()
                if self._size >= FULL:
                    self.flush()
            self._dirty.set()

    def _gather(self) -> None:
        """Send what was written, a moment after the first of it."""
        while True:
            self._dirty.wait()
            self._dirty.clear()
            time.sleep(GATHER_SECONDS)
            self.flush()


def _redirect(fd: int) -> int:
    """Have a descriptor lead into a pipe, whose other end this is."""
    read, write = os.pipe()
    os.dup2(write, fd, inheritable=True)
    os.close(write)
    os.set_blocking(read, False)
    return read


def _text(raw: io.RawIOBase) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        raw,  # type: ignore[arg-type]
        encoding="utf-8",
        errors="backslashreplace",
        newline="\n",
        write_through=True,
    )


def _be_plain() -> None:
    """In a process that code has forked: write to the descriptors, as the threads are gone."""
    for fd, name in STREAMS.items():
        stream = open(  # noqa: SIM115
            fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
