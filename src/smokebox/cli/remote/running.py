"""A command in a sandbox with its output shown here as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.sandbox.api import ExecStream
    from smokebox.types import Stream


async def show(running: ExecStream) -> int:
    """Show the output of a command on the streams of this process, and give its exit code.

    Cancelling kills the command.
    """
    async with running as output:
        async for chunk in output:
            write(chunk.stream, chunk.data)
    return running.exit_code


def write(name: Stream, text: str) -> None:
    """Write what came of one stream to the same one of this process, at once."""
    stream = sys.stdout if name == "stdout" else sys.stderr
    stream.write(text)
    stream.flush()
