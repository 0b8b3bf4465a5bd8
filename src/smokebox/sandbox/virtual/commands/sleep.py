"""`sleep`, which ends at once when the script is cancelled or times out."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.command import CommandStream

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_INTERVAL = re.compile(
    r"\+?(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|inf(?:inity)?)([smhd]?)"
)
# A longer timer overflows the clock.
_MAX_SECONDS = 100_000_000.0


async def sleep(call: CommandStream) -> int:
    """Wait for the sum of the intervals."""
    words = call.args[1:] if call.args[:1] == ["--"] else call.args
    if not words:
        await call.write_error("sleep: missing operand\n")
        return 1
    total = 0.0
    for word in words:
        match = _INTERVAL.fullmatch(word)
        if not match:
            await call.write_error(f"sleep: invalid time interval '{word}'\n")
            return 1
        total += float(match[1]) * _UNITS[match[2]]
    await asyncio.sleep(min(total, _MAX_SECONDS))
    return 0
