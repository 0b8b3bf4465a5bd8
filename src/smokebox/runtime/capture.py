"""Conversion of a running command to a result, or to a stream that ends with one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Protocol, Self

from smokebox.runtime.output import CapturedOutput, CapturedStream, Collector, Decoder
from smokebox.runtime.stream import Chunk
from smokebox.types import ExecResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from smokebox.runtime.process import Exit
    from smokebox.runtime.spill import SpillFolder
    from smokebox.types import Stream

TIMED_OUT_EXIT_CODE = 124


class CommandProcess(Protocol):
    """A running command. Leaving its block early kills it."""

    @property
    def exit(self) -> Exit | None:
        """Its exit, known once `read` has returned None."""
        ...

    async def read(self) -> Chunk | None:
        """Return the next bytes of its output, or None at the end."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


async def collect(
    start: Callable[[], Awaitable[CommandProcess]],
    *,
    spills: SpillFolder,
    max_output: int,
    timeout: float | None = None,
    rate: int | None = None,
) -> ExecResult:
    """Wait for a command, and return its result with at most `max_output` bytes per stream."""
    started = time.monotonic()
    collector = Collector(spills, max_output)
    limiter = ByteRateLimiter(rate)
    try:
        async with await start() as process:
            while chunk := await process.read():
                await collector.feed(chunk.stream, chunk.data)
                await limiter.wait(len(chunk.data))
        collected = await collector.finish()
    except BaseException:
        collector.abandon()
        raise
    return _result(process, collected, timeout, started)


async def stream(
    start: Callable[[], Awaitable[CommandProcess]],
    *,
    timeout: float | None = None,
    rate: int | None = None,
) -> AsyncGenerator[Chunk | ExecResult, None]:
    """Yield the output of a command as it is written, then its result without output."""
    started = time.monotonic()
    limiter = ByteRateLimiter(rate)
    async with await start() as process:
        while chunk := await process.read():
            yield chunk
            await limiter.wait(len(chunk.data))
    empty = CapturedStream(text="")
    output = CapturedOutput(stdout=empty, stderr=empty)
    result = _result(process, output, timeout, started)
    if result.stderr:
        yield Chunk("stderr", result.stderr.encode())
    yield ExecResult(
        exit_code=result.exit_code, timed_out=result.timed_out, duration=result.duration
    )


async def decode_stream(
    source: AsyncGenerator[Chunk | ExecResult, None],
) -> AsyncGenerator[OutputChunk | ExecResult, None]:
    """Decode the chunks of a stream. Closing it closes the source."""
    decoders: dict[Stream, Decoder] = {"stdout": Decoder(), "stderr": Decoder()}
    async with contextlib.aclosing(source):
        async for item in source:
            if isinstance(item, Chunk):
                if text := decoders[item.stream].feed(item.data):
                    yield OutputChunk(item.stream, text)
                continue
            for name, decoder in decoders.items():
                if text := decoder.finish():
                    yield OutputChunk(name, text)
            yield item


class ByteRateLimiter:
    """Limits a reader to `rate` bytes a second: a program blocks while its pipe is full."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._next = time.monotonic()

    async def wait(self, count: int) -> None:
        """Wait as long as `count` bytes take at that rate."""
        if self._rate is not None:
            now = time.monotonic()
            self._next = max(self._next, now - 1.0) + count / self._rate
            await asyncio.sleep(max(0.0, self._next - now))


def _result(
    process: CommandProcess, output: CapturedOutput, timeout: float | None, started: float
) -> ExecResult:
    assert process.exit is not None
    stdout, stderr, timed_out = output.stdout, output.stderr, process.exit.timed_out
    return ExecResult(
        exit_code=TIMED_OUT_EXIT_CODE if timed_out else process.exit.code,
        stdout=stdout.text,
        stderr=stderr.text + (f"smokebox: timed out after {timeout:g} s\n" if timed_out else ""),
        truncated=stdout.truncated or stderr.truncated,
        timed_out=timed_out,
        duration=time.monotonic() - started,
        stdout_file=stdout.file,
        stderr_file=stderr.file,
    )
