"""Commands that are waited for: `exec` and `exec_bytes` in a run of a sandbox."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from smokebox.engine.jail import agent
from smokebox.engine.run import CannotStart
from smokebox.options import check_timeout
from smokebox.sandbox.capture import collect
from smokebox.sandbox.capture import stream as stream_of
from smokebox.sandbox.pipes import Chunk
from smokebox.sandbox.process import Process
from smokebox.sandbox.text import encode_option
from smokebox.types import ExecResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.engine.run import Program, Run
    from smokebox.sandbox.spill import SpillFolder


async def execute(
    run: Run,
    program: Program,
    *,
    spills: SpillFolder,
    max_output: int,
    timeout: float | None = None,
    stdin: str | bytes | None = None,
    rate: int | None = None,
) -> ExecResult:
    """Run a program, wait for it, and keep its output up to a bound."""
    starting = functools.partial(start, run, program, timeout=timeout, stdin=stdin)
    try:
        return await collect(
            starting, spills=spills, max_output=max_output, timeout=timeout, rate=rate
        )
    except CannotStart as failure:
        return ExecResult(exit_code=failure.exit_code, stderr=f"smokebox: {failure}\n")


async def stream(
    run: Run,
    program: Program,
    *,
    timeout: float | None = None,
    stdin: str | bytes | None = None,
    rate: int | None = None,
) -> AsyncGenerator[Chunk | ExecResult, None]:
    """Run a program and give its output as it is written, then how it ended."""
    starting = functools.partial(start, run, program, timeout=timeout, stdin=stdin)
    try:
        async with contextlib.aclosing(stream_of(starting, timeout=timeout, rate=rate)) as items:
            async for item in items:
                yield item
    except CannotStart as failure:
        yield Chunk("stderr", f"smokebox: {failure}\n".encode())
        yield ExecResult(exit_code=failure.exit_code)


async def start(
    run: Run,
    program: Program,
    *,
    timeout: float | None = None,
    stdin: str | bytes | None = None,
) -> Process:
    """Start a program that ends with whoever holds it."""
    timeout = check_timeout(timeout)
    data = None if stdin is None else encode_option("stdin", stdin)
    request = program.pack(agent.RUN, timeout=timeout)
    return await Process.begin(
        await run.jail.connect(),
        request,
        explain=program.explain,
        owner=run.owner(program),
        timeout=timeout,
        stdin=data,
    )
