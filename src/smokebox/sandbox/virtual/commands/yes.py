"""`yes`, until the reader exits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandStream

_BLOCK = 16 * 1024


async def yes(call: CommandStream) -> int:
    """Repeat the arguments, or `y`."""
    words = call.args[1:] if call.args[:1] == ["--"] else call.args
    line = (" ".join(words or ["y"]) + "\n").encode()
    block = line * max(1, _BLOCK // len(line))
    while True:
        await call.write(block)
