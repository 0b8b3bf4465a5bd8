"""The protocol of the kernel and the engine: lines of JSON through two pipes.

No interrupt arrives in the middle of a line.
"""

from __future__ import annotations

import json
import os
import signal
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

READ = 1 << 16


class InterruptGuard:
    """Raises `KeyboardInterrupt` on SIGINT while code runs, and ignores it otherwise.

    `with guard:` postpones an interrupt to the end of the block. Only the main thread is ever
    interrupted, so blocks of other threads do nothing.
    """

    def __init__(self) -> None:
        self.running = False
        self.pending = False
        self._depth = 0
        self._main = threading.get_ident()
        self.begin()
        self.end()

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            self._depth -= 1
            if self.pending and not self._depth and self.running:
                self.pending = False
                raise KeyboardInterrupt

    def begin(self) -> None:
        """Let interrupts through to the code. Replaces a handler of earlier code."""
        signal.signal(signal.SIGINT, self._interrupt)
        self.pending = False
        self.running = True

    def end(self) -> None:
        """Ignore interrupts."""
        self.running = False

    def _interrupt(self, *_: Any) -> None:
        if not self.running:
            return
        if self._depth:
            self.pending = True
        else:
            raise KeyboardInterrupt


class Requests:
    """Requests of the engine, one per line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def next(self) -> dict[str, Any] | None:
        """Wait for the next request; return None at the end of file."""
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            data = os.read(self._fd, READ)
            if not data:
                return None
            pieces.append(data)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        return request


class Frames:
    """Frames to the engine, one per line. Any thread may send one."""

    def __init__(self, fd: int, guard: InterruptGuard) -> None:
        self._fd = fd
        self._guard = guard
        self._lock = threading.Lock()
        self._held: list[bytes] = []
        self.id = ""
        os.register_at_fork(after_in_child=self._discard_in_child)

    def hold(self, kind: str, **fields: Any) -> None:
        """Send a frame together with the next one."""
        line = self._line(kind, fields)
        with self._guard, self._lock:
            self._held.append(line)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a frame."""
        line = self._line(kind, fields)
        with self._guard, self._lock:
            left = memoryview(b"".join([*self._held, line]))
            self._held = []
            while left:
                left = left[os.write(self._fd, left) :]

    def _discard_in_child(self) -> None:
        """Send no frames from a process that the code forked."""
        self._lock = threading.Lock()
        self._fd = os.open(os.devnull, os.O_WRONLY)

    def _line(self, kind: str, fields: dict[str, Any]) -> bytes:
        frame = {"type": kind, "id": self.id, **fields}
        text = json.dumps(frame, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # A lone surrogate cannot be encoded in UTF-8.
        return text.encode("utf-8", "replace") + b"\n"
