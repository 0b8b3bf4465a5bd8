"""What a script prints, as it is heard from the engine: kept for `exec`, passed on for streams.

The engine decodes each write by itself, so a character that is split over two writes
arrives as two replacement characters; only the whole stream, at the end, has it right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from smokebox.sandbox.virtual.limits import MAX_OUTPUT
from smokebox.types import ExecResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.sandbox.virtual.ending import Ending
    from smokebox.types import Stream

REPLACEMENT = "\ufffd"


class Listener(Protocol):
    """What the engine tells its output to, from its own thread."""

    def hear(self, stdout: str, stderr: str) -> None:
        """Take one write; one of the two is empty."""
        ...


class Kept:
    """Output for a result: the whole streams, or what was heard where those are lost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stdout: list[str] = []
        self._stderr: list[str] = []

    def hear(self, stdout: str, stderr: str) -> None:
        if stdout:
            self._stdout.append(stdout)
        if stderr:
            self._stderr.append(stderr)

    def result(self, ending: Ending, duration: float) -> ExecResult:
        """How it ended, with its output."""
        out = "".join(self._stdout) if ending.stdout is None else ending.stdout
        err = "".join(self._stderr) if ending.stderr is None else ending.stderr
        stdout, stderr = _cut(out, self._limit), _cut(err, self._limit)
        full = ending.stdout is None and any(_size(text) >= MAX_OUTPUT for text in (out, err))
        return ExecResult(
            exit_code=ending.exit_code,
            stdout=stdout,
            stderr=stderr + ending.message,
            truncated=ending.truncated or full or (stdout, stderr) != (out, err),
            timed_out=ending.timed_out,
            duration=duration,
        )


class Live:
    """Output for a stream: chunks as they are written, none cut inside a character."""

    def __init__(self, limit: int, put: Callable[[OutputChunk], None]) -> None:
        self._tracks = {name: _Track(limit) for name in ("stdout", "stderr")}
        self._put = put

    def hear(self, stdout: str, stderr: str) -> None:
        if stdout:
            self._send("stdout", self._tracks["stdout"].take(stdout))
        if stderr:
            self._send("stderr", self._tracks["stderr"].take(stderr))

    def result(self, ending: Ending, duration: float) -> ExecResult:
        """Send what was held back, and say how it ended."""
        self._send("stdout", self._tracks["stdout"].rest(ending.stdout))
        self._send("stderr", self._tracks["stderr"].rest(ending.stderr) + ending.message)
        return ExecResult(
            exit_code=ending.exit_code,
            truncated=ending.truncated or any(track.full for track in self._tracks.values()),
            timed_out=ending.timed_out,
            duration=duration,
        )

    def _send(self, stream: Stream, text: str) -> None:
        if text:
            self._put(OutputChunk(stream, text))


class _Track:
    """One stream: how much of it was passed on, and what is held back."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._passed = 0
        self._held: list[str] = []
        self.full = False

    def take(self, text: str) -> str:
        if self._held or text.endswith(REPLACEMENT):
            self._held.append(text)
            return ""
        self._passed += len(text)
        return self._within(text)

    def rest(self, whole: str | None) -> str:
        text = "".join(self._held) if whole is None else whole[self._passed :]
        self._held = []
        return self._within(text)

    def _within(self, text: str) -> str:
        shown = _cut(text, self._left)
        self._left -= _size(shown)
        self.full = self.full or shown != text
        return shown


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _cut(text: str, limit: int) -> str:
    """The beginning of a text, in at most so many bytes."""
    if _size(text) <= limit:
        return text
    return text.encode()[:limit].decode(errors="ignore")
