"""Compare vttest in a terminal of a sandbox with vttest in a terminal of the host.

vttest is the reference test of terminals. pyte draws its screens, once from a bare PTY and once
from a terminal behind the sandbox, the server and the SDK: output that is lost, doubled, reordered
or of the wrong size shows as a difference.
"""

from __future__ import annotations

import asyncio
import os
import pty
import shutil
import struct
import termios
from fcntl import ioctl
from typing import TYPE_CHECKING, Protocol

import pyte
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox import Client, Terminal

COLS, ROWS = 80, 24
# Silence after which a screen counts as drawn.
SETTLED = 0.4
# Chapters of its menu that need no human, and the maximum number of screens of each.
CHAPTERS = {"cursor movements": "1", "screen features": "2", "insert and delete": "8"}
MAX_SCREENS = 40

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("vttest") is None, reason="apt-get install -y vttest"),
]


class Program(Protocol):
    """Program that accepts input, and is read until it is silent."""

    async def write(self, data: bytes) -> None: ...

    async def read(self) -> bytes: ...


class HostProgram:
    """vttest on a PTY of the host."""

    def __init__(self) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "xterm-256color"
            os.execvp("vttest", ["vttest"])
        ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("@4H", ROWS, COLS, 0, 0))
        os.set_blocking(self.fd, False)

    async def write(self, data: bytes) -> None:
        os.write(self.fd, data)

    async def read(self) -> bytes:
        await asyncio.sleep(0.02)
        try:
            return os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


class SandboxProgram:
    """vttest in a sandbox by the SDK."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.reading: asyncio.Future[bytes] | None = None

    async def write(self, data: bytes) -> None:
        await self.terminal.write(data)

    async def read(self) -> bytes:
        self.reading = self.reading or asyncio.ensure_future(anext(self.terminal, b""))
        done, _ = await asyncio.wait((self.reading,), timeout=0.02)
        if not done:
            return b""
        finished, self.reading = self.reading, None
        return finished.result()

    def close(self) -> None:
        if self.reading is not None:
            self.reading.cancel()


class ReplyingScreen(pyte.Screen):
    """Screen that keeps its replies, such as the position of the cursor."""

    def __init__(self, cols: int, rows: int) -> None:
        super().__init__(cols, rows)
        self.replies: list[str] = []

    def write_process_input(self, data: str) -> None:
        self.replies.append(data)


class Screen:
    """Screen of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.screen = ReplyingScreen(COLS, ROWS)
        self.stream = pyte.ByteStream(self.screen)

    async def type(self, keys: str) -> str:
        """Type, wait until nothing changes, and return the screen."""
        await self.program.write(keys.encode())
        silent = 0.0
        while silent < SETTLED:
            data = await self.program.read()
            silent = 0.0 if data else silent + 0.02
            self.stream.feed(data)
            while self.screen.replies:
                await self.program.write(self.screen.replies.pop(0).encode())
        return "\n".join(self.screen.display)


async def screens(program: Program, chapter: str) -> AsyncIterator[str]:
    """Yield every screen of a chapter, from the menu and back to it."""
    screen = Screen(program)
    menu = await screen.type("")
    assert "Choose test type" in menu
    yield menu
    shown = await screen.type(f"{chapter}\r")
    for _ in range(MAX_SCREENS):
        yield shown
        if "Choose test type" in shown:
            return
        shown = await screen.type("\r")
    raise AssertionError(f"chapter {chapter} has no end:\n{shown}")


@pytest.mark.parametrize("chapter", CHAPTERS)
async def test_screens_equal_those_of_a_host_terminal(client: Client, chapter: str) -> None:
    host = HostProgram()
    try:
        expected = [one async for one in screens(host, CHAPTERS[chapter])]
    finally:
        host.close()
    sandbox = client.sandbox(f"vttest-{CHAPTERS[chapter]}")
    async with await sandbox.create_terminal(command=["vttest"], cols=COLS, rows=ROWS) as terminal:
        program = SandboxProgram(terminal)
        shown = [one async for one in screens(program, CHAPTERS[chapter])]
        program.close()
    await sandbox.destroy()
    assert len(expected) > 3
    assert shown == expected
