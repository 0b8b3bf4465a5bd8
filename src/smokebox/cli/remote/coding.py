"""Code in a sandbox with what it writes and shows printed here as it comes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.cli.remote.running import write
from smokebox.cli.table import print_json
from smokebox.types import CodeError, CodeResult, OutputChunk

if TYPE_CHECKING:
    from smokebox.sandbox.code import CodeStream
    from smokebox.types import Stream

# The first of these that a result has is printed.
_TEXTS = ("text", "markdown", "latex", "html", "svg", "javascript")
FAILED, TIMED_OUT = 1, 124


async def show(running: CodeStream, *, as_json: bool) -> int:
    """Print what comes of code, or all of it as JSON at the end, and give the exit code.

    Cancelling interrupts the code.
    """
    results: list[CodeResult] = []
    output: dict[Stream, str] = {"stdout": "", "stderr": ""}
    async with running as events:
        async for event in events:
            if not as_json:
                _print(event)
            elif isinstance(event, OutputChunk):
                output[event.stream] += event.data
            elif isinstance(event, CodeResult):
                results.append(event)
    ended = running.execution
    if as_json:
        stdout, stderr = output.values()
        print_json(replace(ended, results=tuple(results), stdout=stdout, stderr=stderr))
    if ended.timed_out:
        return TIMED_OUT
    return 0 if ended.success else FAILED


def _print(event: OutputChunk | CodeResult | CodeError) -> None:
    if isinstance(event, OutputChunk):
        write(event.stream, event.data)
    elif isinstance(event, CodeError):
        told = f"{event.name}: {event.message}"
        text = event.traceback.rstrip() if told in event.traceback else told
        write("stderr", f"{text}\n")
    else:
        texts = (getattr(event, name) for name in _TEXTS)
        write("stdout", f"{next(filter(None, texts), '')}\n")
        for name in ("png", "jpeg", "pdf"):
            if (data := getattr(event, name)) is not None:
                write("stderr", f"[{name}, {len(data)} bytes: --json has them]\n")
