"""Interactive shell on a sandbox: runs typed commands and streams their output."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Self

from smokebox.cli.output import report, write_chunk
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

    from smokebox.cli.shell.directory import Directory
    from smokebox.sandbox.api import SandboxApi

# A bare `exit` leaves the shell; any other use of the word belongs to the sandbox.
_EXIT = re.compile(r"\s*exit(?:\s+(\d+))?\s*;?\s*")


class InteractiveShell:
    """Shell that runs commands in one sandbox, one at a time, on its own event loop.

    Ctrl-C kills the command and returns to the prompt. SIGTERM and SIGHUP kill it and end the
    shell, so that no command outlives it.
    """

    def __init__(self, sandbox: SandboxApi, directory: Directory) -> None:
        self._sandbox = sandbox
        self._directory = directory
        self._runner = asyncio.Runner()
        self._ended_by = 0
        self._line_is_open = False
        self.code = 0

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(self._sandbox.aclose())
        finally:
            self._runner.close()
            self._directory.close()
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def run(self, command: str, *, stdin: bytes | None = None, timeout: float | None = None) -> int:
        """Run one command, stream its output, and return its exit code."""
        return self._wait(self._show(command, stdin, timeout))

    def interact(self) -> int:
        """Run typed commands until the input ends, and return the last exit code."""
        sys.stdout.write(f"{self._directory.place} sandbox; Ctrl-C stops a command, Ctrl-D exits\n")
        sys.stdout.flush()
        # Imported late: the line above is on screen while prompt_toolkit loads.
        from smokebox.cli.shell.input import open_reader

        read = open_reader()
        while not self._ended_by:
            try:
                text = read(self._prompt())
            except EOFError:
                sys.stdout.write("\n")
                return self.code
            except KeyboardInterrupt:
                self.code = 128 + signal.SIGINT
                continue
            if match := _EXIT.fullmatch(text):
                return int(match[1]) & 0xFF if match[1] else self.code
            self._run_line(text)
        return 128 + self._ended_by

    def _run_line(self, text: str) -> None:
        if not text.strip():
            return
        try:
            self.code = self.run(text)
            self._wait(self._directory.follow(self.code))
        except SmokeboxError as error:
            self.code = report(error)
        if self._line_is_open:
            sys.stdout.write("\n")
            self._line_is_open = False

    async def _show(self, command: str, stdin: bytes | None, timeout: float | None) -> int:
        running = self._sandbox.exec_stream(
            command,
            cwd=self._directory.cwd(),
            env=self._directory.env(),
            stdin=stdin,
            timeout=timeout,
        )
        async with running as output:
            async for chunk in output:
                write_chunk(chunk.stream, chunk.data)
                self._line_is_open = not chunk.data.endswith("\n")
        return running.exit_code

    def _wait(self, work: Coroutine[None, None, int | None]) -> int:
        try:
            return self._runner.run(work) or 0
        except KeyboardInterrupt:
            self._line_is_open = True
            return 128 + (self._ended_by or signal.SIGINT)

    def _end(self, number: int, _: FrameType | None) -> None:
        self._ended_by = number
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # SIGINT is ignored in background jobs of a script.
            raise KeyboardInterrupt
        # The runner cancels its task on SIGINT, so send it one.
        signal.raise_signal(signal.SIGINT)

    def _prompt(self) -> str:
        failed = f"[{self.code}] " if self.code else ""
        name = self._directory.place
        if "NO_COLOR" in os.environ:
            return f"{failed}{name}:{self._directory.path}$ "
        return f"\x1b[31m{failed}\x1b[32m{name}\x1b[0m:\x1b[34m{self._directory.path}\x1b[0m$ "
