"""A sandbox with a person in front of it: runs what is typed, and shows it as it comes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Self

from smokebox.cli.failure import report
from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

    from smokebox.cli.shell.directory import Directory
    from smokebox.sandbox.api import SandboxApi

# A bare `exit` leaves the shell; any other use of the word belongs to the sandbox.
_EXIT = re.compile(r"\s*exit(?:\s+(\d+))?\s*;?\s*")


class Shell:
    """Runs commands in one sandbox, one at a time, on an event loop of its own.

    Ctrl-C cancels the command, which kills it, and the shell goes on. SIGTERM and SIGHUP
    cancel it too and end the shell, so that no command outlives it.
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
        """Run one command with its output shown live, and give its exit code."""
        return self._wait(self._show(command, stdin, timeout))

    def interact(self) -> int:
        """Run what is typed until it ends, and give the last exit code."""
        sys.stdout.write(
            f"{self._directory.place} sandbox; Ctrl-C stops a command, Ctrl-D leaves\n"
        )
        sys.stdout.flush()
        # Imported late: the line above stands while prompt_toolkit loads.
        from smokebox.cli.shell.terminal import open_terminal

        read = open_terminal()
        while not self._ended_by:
            try:
                text = read(self._prompt())
            except EOFError:
                sys.stdout.write("\n")
                return self.code
            except KeyboardInterrupt:
                self.code = 128 + signal.SIGINT
                continue
            if leaving := _EXIT.fullmatch(text):
                return int(leaving[1]) & 0xFF if leaving[1] else self.code
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
                stream = sys.stdout if chunk.stream == "stdout" else sys.stderr
                stream.write(chunk.data)
                stream.flush()
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
            # In the background of a script SIGINT does nothing.
            raise KeyboardInterrupt
        # The runner knows how to cancel what runs when SIGINT comes, so that comes.
        signal.raise_signal(signal.SIGINT)

    def _prompt(self) -> str:
        failed = f"[{self.code}] " if self.code else ""
        name = self._directory.place
        if "NO_COLOR" in os.environ:
            return f"{failed}{name}:{self._directory.path}$ "
        return f"\x1b[31m{failed}\x1b[32m{name}\x1b[0m:\x1b[34m{self._directory.path}\x1b[0m$ "
