"""What the kernel and the engine say to each other: lines of JSON, through two pipes."""

from __future__ import annotations

import json
import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .calm import InterruptGuard

READ = 1 << 16


class Requests:
    """Lines from the engine, each one thing to do."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def next(self) -> dict[str, Any] | None:
        """The next request; None when there will be no more."""
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
    """Lines to the engine. Each is whole, whoever sends one beside it, or interrupts."""

    def __init__(self, fd: int, calm: InterruptGuard) -> None:
        self._fd = fd
        self._calm = calm
        self._lock = threading.Lock()
        self._held: list[bytes] = []
        self.id = ""
        os.register_at_fork(after_in_child=self._fall_silent)

    def hold(self, kind: str, **fields: Any) -> None:
        """Send something together with what comes next, which is soon."""
        line = self._line(kind, fields)
        with self._calm, self._lock:
            self._held.append(line)

    def send(self, kind: str, **fields: Any) -> None:
        """Send something at once."""
        line = self._line(kind, fields)
        with self._calm, self._lock:
            left = memoryview(b"".join([*self._held, line]))
            self._held = []
            while left:
                left = left[os.write(self._fd, left) :]

    def _fall_silent(self) -> None:
        """In a process that code has forked, which is not the kernel."""
        self._lock = threading.Lock()
        self._fd = os.open(os.devnull, os.O_WRONLY)

    def _line(self, kind: str, fields: dict[str, Any]) -> bytes:
        frame = {"type": kind, "id": self.id, **fields}
        text = json.dumps(frame, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # Half of a surrogate pair is no text, and nobody could read the line.
        return text.encode("utf-8", "replace") + b"\n"
