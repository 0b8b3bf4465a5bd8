"""Pseudoterminal for tests, and the path of the `smokebox` command."""

from __future__ import annotations

import functools
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

Run = Callable[..., subprocess.CompletedProcess[str]]
Open = Callable[..., "Terminal"]

SMOKEBOX = str(Path(sys.executable).with_name("smokebox"))
WITHOUT_PROMPT_TOOLKIT = (
    "import sys; sys.modules['prompt_toolkit'] = None; "
    "from smokebox.cli import main; sys.exit(main())"
)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
TIMEOUT = 15.0


class Terminal:
    """A program in a terminal."""

    def __init__(
        self, command: list[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        controller, terminal = os.openpty()
        termios.tcsetwinsize(terminal, (40, 200))
        env = {**(env or os.environ), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, preexec_fn=functools.partial(os.login_tty, terminal)
        )
        os.close(terminal)
        self._fd = controller
        self.unread = ""
        self.seen = ""

    def type(self, text: str) -> None:
        """Type `text` and Enter."""
        self.press(text + "\r")

    def press(self, keys: str) -> None:
        """Press keys, such as `\\x04` for Ctrl-D."""
        os.write(self._fd, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C a moment after the last output.

        Python's readline loses a signal that arrives before it waits for the next key.
        """
        time.sleep(0.2)
        self.press("\x03")

    def resize(self, *, cols: int, rows: int) -> None:
        """Resize the window."""
        termios.tcsetwinsize(self._fd, (rows, cols))

    def echoes(self) -> bool:
        """Return whether the terminal is in the mode of a shell: echo on, Ctrl-C a signal."""
        modes = termios.tcgetattr(self._fd)[3]
        return bool(modes & termios.ECHO and modes & termios.ISIG and modes & termios.ICANON)

    def expect(self, pattern: str) -> str:
        """Read until `pattern` appears, and return everything up to it."""
        deadline = time.monotonic() + TIMEOUT
        while not (match := re.search(pattern, self.unread)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} did not appear in {self.unread!r}"
            if select.select([self._fd], [], [], left)[0]:
                text = os.read(self._fd, 65536).decode()
                self.seen += text
                self.unread = ESCAPES.sub("", self.unread + text)
        before, self.unread = self.unread[: match.end()], self.unread[match.end() :]
        return before

    def wait(self) -> int:
        """Wait until the program ends, and return its exit code."""
        with suppress(OSError):  # EIO: the other side is closed.
            while os.read(self._fd, 65536):
                pass
        return self.process.wait(TIMEOUT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
