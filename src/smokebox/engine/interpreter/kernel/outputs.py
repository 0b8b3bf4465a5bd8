"""Output of code: written to sys.stdout and sys.stderr, or directly to descriptors 1 and 2.

Both are gathered in one list, in the order of writing, and sent as frames: immediately when there
is much of it, else after a short delay. Output between executions is sent with the next one.
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
    from .wire import Frames, InterruptGuard

STREAMS = {1: "stdout", 2: "stderr"}
# Bytes that are sent immediately, and the delay of less.
FULL = 1 << 15
GATHER_SECONDS = 0.004
# Bytes that are kept between executions.
MAX_IDLE = 1 << 16
_PIPE = 1 << 16


class OutputBytes(io.RawIOBase):
    """The raw stream of sys.stdout or sys.stderr. Its descriptor is for child processes."""

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
    """sys.stdout or sys.stderr: line-buffered, and sent immediately when flushed."""

    def __init__(self, outputs: Outputs, fd: int) -> None:
        super().__init__(
            OutputBytes(outputs, fd),  # type: ignore[arg-type]
            encoding="utf-8",
            errors="backslashreplace",
            newline="\n",
            line_buffering=True,
        )
        self._outputs = outputs

    def flush_line(self) -> None:
        """Pass on an incomplete line."""
        if not self.closed:
            super().flush()

    def flush(self) -> None:
        self.flush_line()
        self._outputs.flush()


class Outputs:
    """Both streams of the kernel."""

    def __init__(self, frames: Frames, guard: InterruptGuard) -> None:
        self._frames = frames
        self._guard = guard
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
        os.register_at_fork(after_in_child=self._reset_in_child)
        # Only the main thread may be interrupted; threads inherit the signal mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for work in (self._read_pipes, self._flush_later):
            threading.Thread(target=work, name="smokebox", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def bind(self) -> None:
        """Set sys.stdout and sys.stderr, which the last code may have replaced."""
        for fd, name in STREAMS.items():
            text = self._texts.get(name)
            if text is None or text.closed:
                text = self._texts[name] = OutputText(self, fd)
            setattr(sys, name, text)

    def begin(self) -> None:
        """Start an execution: earlier output is sent with it."""
        with self._guard, self._lock:
            self._open = True
            if self._dropped:
                note = f"[smokebox: {self._dropped} bytes before this are left out]\n"
                self._pieces.insert(0, (1, note.encode()))
                self._dropped = 0
            self._dirty.set()

    def end(self) -> None:
        """End an execution: send the rest of its output."""
        with self._guard, self._lock:
            self.show(last=True)
            self._open = False

    def show(self, last: bool = False) -> None:
        """Send all output, including incomplete lines."""
        with self._guard, self._lock:
            for text in self._texts.values():
                text.flush_line()
            self.flush(last)

    def put(self, fd: int, data: bytes) -> None:
        """Add output of Python code, after earlier output in the pipes."""
        if self._forked:
            return
        with self._guard, self._lock:
            if self._peek.poll(0):
                self._drain()
            self._keep(fd, data)
            if self._size >= FULL:
                self.flush()
            elif not self._dirty.is_set():
                self._dirty.set()

    def flush(self, last: bool = False) -> None:
        """Send the output so far; with `last` also incomplete characters."""
        if self._forked:
            return
        with self._guard, self._lock:
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
        while not self._open and self._size > MAX_IDLE:
            size = len(self._pieces.pop(0)[1])
            self._size -= size
            self._dropped += size

    def _drain(self) -> None:
        """Read the pipes, at most what they can hold."""
        for pipe, fd in self._pipes.items():
            try:
                data = os.read(pipe, _PIPE)
            except (BlockingIOError, InterruptedError):
                continue
            if data:
                self._keep(fd, data)

    def _read_pipes(self) -> None:
        """Read output that bypasses Python, in a thread."""
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

    def _reset_in_child(self) -> None:
        """Write to the descriptors in a process that the code forked: it has no threads."""
        self._forked = True
        for fd, name in STREAMS.items():
            stream = open(  # noqa: SIM115
                fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)

    def _flush_later(self) -> None:
        """Send output after a short delay, in a thread."""
        while True:
            self._dirty.wait()
            self._dirty.clear()
            time.sleep(GATHER_SECONDS)
            self.flush()


def _redirect(fd: int) -> int:
    """Replace a descriptor by a pipe, and return the reading end."""
    read, write = os.pipe()
    os.dup2(write, fd, inheritable=True)
    os.close(write)
    os.set_blocking(read, False)
    return read
