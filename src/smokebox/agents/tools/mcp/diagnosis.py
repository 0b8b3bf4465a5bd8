"""Why an MCP server is not there: what it complained about, in a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TextIO

from smokebox.errors import SmokeboxError

_MOST = 2000
_READ = 65536


class Complaints:
    """The end of what a server wrote to its standard error."""

    def __init__(self) -> None:
        self._text = ""
        self._pipe: tuple[int, TextIO] | None = None

    def add(self, text: str) -> None:
        """Take what was written."""
        self._text = (self._text + text)[-_MOST:]

    def file(self) -> TextIO:
        """What a process of this host can write to: a pipe, as a file would grow for ever."""
        if self._pipe is None:
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            self._pipe = reading, os.fdopen(writing, "w")
            asyncio.get_running_loop().add_reader(reading, self._read, reading)
        return self._pipe[1]

    def last_line(self) -> str:
        """The last line that says something, or nothing."""
        if self._pipe is not None:
            self._read(self._pipe[0])
        lines = reversed(self._text.splitlines())
        return next((line.strip() for line in lines if line.strip()), "")

    def close(self) -> None:
        """Let go of the pipe."""
        if self._pipe is not None:
            reading, writing = self._pipe
            self._pipe = None
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)
            writing.close()

    def _read(self, reading: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self.add(os.read(reading, _READ).decode(errors="replace"))


def said(error: BaseException) -> str:
    """What went wrong, out of as many groups as it may be in."""
    cause = first(error)
    if isinstance(cause, SmokeboxError):
        return cause.message
    if isinstance(cause, TimeoutError):
        return "it did not answer in time"
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def first(error: BaseException) -> BaseException:
    """The first error that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
