"""The line that a person types next."""

from __future__ import annotations

import asyncio
import sys

_PROMPT = "> "


async def ask() -> str | None:
    """A line; None at the end of the input. Ctrl-C forgets what was typed."""
    try:
        return await _read()
    except EOFError:
        return None
    except KeyboardInterrupt:
        return ""


async def _read() -> str:
    if not sys.stdin.isatty():
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        return str(await asyncio.to_thread(input, _PROMPT))
    return str(await PromptSession[str]().prompt_async(_PROMPT))
