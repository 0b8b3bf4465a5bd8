"""What code prints: through sys.stdout, or past Python to the descriptors 1 and 2.

Both ways end in one list, in the order of writing, which goes out as frames: at once when
much is there, else a moment later. What is written while no code runs waits for the next.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import signal
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .calm import InterruptGuard
    from .wire import Frames

STREAMS = {1: "stdout", 2: "stderr"}
# A frame that much is due at once; what is printed line by line is gathered for so long.
FULL = 1 << 15
GATHER_SECONDS = 0.004
# The most that is kept for the next code, of what is written while none runs.
MOST_IDLE = 1 << 16
_PIPE = 1 << 16


class OutputBytes(io.RawIOBase):
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


class OutputText(io.TextIOWrapper):
    """sys.stdout or sys.stderr: by lines, as in a terminal, and at once when it is flushed."""

    def __init__(self, outputs: Outputs, fd: int) -> None:
        super().__init__(
            OutputBytes(outputs, fd),  # type: ignore[arg-type]
            encoding="utf-8",
            errors="backslashreplace",
            newline="\n",
            line_buffering=True,
        )
        self._outputs = outputs

    def give(self) -> None:
        """Hand over a line that is not whole yet."""
        if not self.closed:
            super().flush()

    def flush(self) -> None:
        self.give()
        self._outputs.flush()


class Outputs:
    """Both streams of the kernel."""

    def __init__(self, frames: Frames, calm: InterruptGuard) -> None:
        self._frames = frames
        self._calm = calm
        self._lock = threading.RLock()
        self._pieces: list[tuple[int, bytes]] = []
        self._size = 0
        self._dropped = 0
        self._open = False
        self._forked = False
        self._dirty = threading.Event()
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {fd: make("replace") for fd in STREAMS}
        self._pipes = {_redirect(fd): fd for fd in STREAMS}
        self._peek = self._poll()
        self._texts: dict[str, OutputText] = {}
        self.bind()
        os.register_at_fork(after_in_child=self._be_plain)
        # An interrupt is for the main thread, and threads take over what it blocks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for work in (self._listen, self._gather):
            threading.Thread(target=work, name="smokebox", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def bind(self) -> None:
        """Have sys.stdout and sys.stderr be ours, whatever the last code put there."""
        for fd, name in STREAMS.items():
            text = self._texts.get(name)
            if text is None or text.closed:
                text = self._texts[name] = OutputText(self, fd)
            setattr(sys, name, text)

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
            self.show(last=True)
            self._open = False

    def show(self, last: bool = False) -> None:
        """Send all that was written, also lines that are not whole."""
        with self._calm, self._lock:
            for text in self._texts.values():
                text.give()
            self.flush(last)

    def put(self, fd: int, data: bytes) -> None:
        """Take what Python code wrote, after what was written past it before."""
        if self._forked:
            return
        with self._calm, self._lock:
            if self._peek.poll(0):
                self._drain()
            self._keep(fd, data)
            if self._size >= FULL:
                self.flush()
            elif not self._dirty.is_set():
                self._dirty.set()

    def flush(self, last: bool = False) -> None:
        """Send what there is; with `last` also characters that are not whole."""
        if self._forked:
            return
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
        poll = self._poll()
        while True:
            poll.poll()
            with self._lock:
                self._drain()
                if self._size >= FULL:
                    self.flush()
            self._dirty.set()

    def _poll(self) -> select.poll:
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe, select.POLLIN)
        return poll

    def _be_plain(self) -> None:
        """In a process that code has forked: write to the descriptors, as the threads are gone."""
        self._forked = True
        for fd, name in STREAMS.items():
            stream = open(  # noqa: SIM115
                fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)

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
