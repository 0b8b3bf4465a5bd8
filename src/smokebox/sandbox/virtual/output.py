"""Output of a script: collected for `exec`, or forwarded for streams.

bashkit decodes each write separately, so a character split over two writes arrives as two
replacement characters; only the whole stream at the end has it right.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from smokebox.sandbox.virtual.limits import MAX_OUTPUT
from smokebox.types import ExecResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from smokebox.sandbox.virtual.shell import ScriptOutcome
    from smokebox.types import Stream


REPLACEMENT = "\ufffd"


class OutputSink(Protocol):
    """Receiver of a script's output, called from the shell's thread."""

    def write(self, stdout: str, stderr: str) -> None:
        """Receive one write; one of the two is empty."""
        ...


class CollectedOutput:
    """Output for a result: the whole streams, or what was received if bashkit dropped them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stdout: list[str] = []
        self._stderr: list[str] = []

    def write(self, stdout: str, stderr: str) -> None:
        if stdout:
            self._stdout.append(stdout)
        if stderr:
            self._stderr.append(stderr)

    def result(self, outcome: ScriptOutcome, duration: float) -> ExecResult:
        """Return the result with its output."""
        out = "".join(self._stdout) if outcome.stdout is None else outcome.stdout
        err = "".join(self._stderr) if outcome.stderr is None else outcome.stderr
        stdout, stderr = _cut(out, self._limit), _cut(err, self._limit)
        truncated = outcome.stdout is None and any(_size(text) >= MAX_OUTPUT for text in (out, err))
        return ExecResult(
            exit_code=outcome.exit_code,
            stdout=stdout,
            stderr=stderr + outcome.message,
            truncated=outcome.truncated or truncated or (stdout, stderr) != (out, err),
            timed_out=outcome.timed_out,
            duration=duration,
        )


class StreamedOutput:
    """Output for a stream: chunks as they are written, never cut inside a character."""

    def __init__(self, limit: int, put: Callable[[OutputChunk], None]) -> None:
        self._limits = {name: _StreamLimit(limit) for name in ("stdout", "stderr")}
        self._put = put

    def write(self, stdout: str, stderr: str) -> None:
        if stdout:
            self._send("stdout", self._limits["stdout"].pass_on(stdout))
        if stderr:
            self._send("stderr", self._limits["stderr"].pass_on(stderr))

    def result(self, outcome: ScriptOutcome, duration: float) -> ExecResult:
        """Send what was held back, and return the result."""
        self._send("stdout", self._limits["stdout"].rest(outcome.stdout))
        self._send("stderr", self._limits["stderr"].rest(outcome.stderr) + outcome.message)
        return ExecResult(
            exit_code=outcome.exit_code,
            truncated=outcome.truncated or any(limit.truncated for limit in self._limits.values()),
            timed_out=outcome.timed_out,
            duration=duration,
        )

    def _send(self, stream: Stream, text: str) -> None:
        if text:
            self._put(OutputChunk(stream, text))


class _StreamLimit:
    """Limit of one stream, and the text held back."""

    def __init__(self, limit: int) -> None:
        self._remaining = limit
        self._passed = 0
        self._held: list[str] = []
        self.truncated = False

    def pass_on(self, text: str) -> str:
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
        shown = _cut(text, self._remaining)
        self._remaining -= _size(shown)
        self.truncated = self.truncated or shown != text
        return shown


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _cut(text: str, limit: int) -> str:
    """Return the beginning of a text, at most `limit` bytes."""
    if _size(text) <= limit:
        return text
    return text.encode()[:limit].decode(errors="ignore")


class ChunkQueue:
    """Queue of chunks from any thread to the event loop that created it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[OutputChunk] = deque()
        self._changed = asyncio.Event()
        self._notified = False
        self._ended = False

    def put(self, chunk: OutputChunk) -> None:
        """Add a chunk, from any thread."""
        self._items.append(chunk)
        # A script that prints a million lines must not wake the loop a million times.
        if not self._notified:
            self._notified = True
            # An abandoned script may outlive the loop.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._notify)

    def end(self) -> None:
        """End the stream after the queued chunks; called from the loop's thread."""
        self._ended = True
        self._changed.set()

    def drain(self) -> list[OutputChunk]:
        """Remove and return the unread chunks."""
        items = list(self._items)
        self._items.clear()
        return items

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        while True:
            while self._items:
                yield self._items.popleft()
            if self._ended:
                return
            await self._changed.wait()
            self._changed.clear()

    def _notify(self) -> None:
        self._notified = False
        self._changed.set()
