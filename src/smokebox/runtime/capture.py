"""From a running command to what its caller gets: a result, or a stream that ends with one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Protocol, Self

from smokebox.runtime.output import Captured, Collected, Collector, Decoder
from smokebox.runtime.stream import Chunk
from smokebox.types import ExecResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from smokebox.runtime.process import Exit
    from smokebox.runtime.spill import SpillFolder
    from smokebox.types import Stream

TIMED_OUT = 124


class CommandProcess(Protocol):
    """A running command: `read` until None, then look at `exit`. Leaving early kills it."""

    @property
    def exit(self) -> Exit | None:
        """How it ended, once it has."""
        ...

    async def read(self) -> Chunk | None:
        """The next bytes of its output, or None when it is over."""
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
    """Wait for a command, and keep its output up to a bound."""
    started = time.monotonic()
    collector = Collector(spills, max_output)
    pace = Pace(rate)
    try:
        async with await start() as process:
            while chunk := await process.read():
                await collector.feed(chunk.stream, chunk.data)
                await pace.keep(len(chunk.data))
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
    """Give a command's output as it is written, and last how it ended."""
    started = time.monotonic()
    pace = Pace(rate)
    async with await start() as process:
        while chunk := await process.read():
            yield chunk
            await pace.keep(len(chunk.data))
    nothing = Captured(text="")
    result = _result(process, Collected(stdout=nothing, stderr=nothing), timeout, started)
    if result.stderr:
        yield Chunk("stderr", result.stderr.encode())
    yield ExecResult(
        exit_code=result.exit_code, timed_out=result.timed_out, duration=result.duration
    )


async def decoded(
    source: AsyncGenerator[Chunk | ExecResult, None],
) -> AsyncGenerator[OutputChunk | ExecResult, None]:
    """The same stream as text. Closing it closes the source."""
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


class Pace:
    """Holds a reader to so many bytes a second: what is not read, a program cannot write on."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._next = time.monotonic()

    async def keep(self, count: int) -> None:
        """Wait for as long as `count` bytes may take."""
        if self._rate is not None:
            at = time.monotonic()
            self._next = max(self._next, at - 1.0) + count / self._rate
            await asyncio.sleep(max(0.0, self._next - at))


def _result(
    process: CommandProcess, output: Collected, timeout: float | None, started: float
) -> ExecResult:
    assert process.exit is not None
    stdout, stderr, late = output.stdout, output.stderr, process.exit.timed_out
    return ExecResult(
        exit_code=TIMED_OUT if late else process.exit.code,
        stdout=stdout.text,
        stderr=stderr.text + (f"smokebox: timed out after {timeout:g} s\n" if late else ""),
        truncated=stdout.truncated or stderr.truncated,
        timed_out=late,
        duration=time.monotonic() - started,
        stdout_file=stdout.file,
        stderr_file=stderr.file,
    )
