"""The terminal that this process runs in, lent to a program elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

    from smokebox.client.terminal import Terminal

_PIECE = 1 << 16
# What a program that could not clean up may have left: another screen, no cursor, a mouse
# and pastes that come as escape sequences.
_RESET = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\r\n"


async def lend(terminal: Terminal) -> int:
    """Have keys, output and the size of the window pass until the program ends: its exit code.

    This terminal is as it was afterwards, however that comes.
    """
    with _raw():
        try:
            async with _keys(terminal), _resizes(terminal):
                async for piece in terminal:
                    _show(piece)
            return await terminal.wait()
        except BaseException:
            _show(_RESET)
            raise


def window() -> os.terminal_size:
    """How large this terminal is."""
    return os.get_terminal_size(sys.stdout.fileno())


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Within the block every key is a byte, also Ctrl-C."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setraw(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextlib.asynccontextmanager
async def _keys(terminal: Terminal) -> AsyncIterator[None]:
    """Type there what is typed here."""
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    typed: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        try:
            keys = os.read(keyboard, _PIECE)
        except OSError:
            keys = b""
        if not keys:
            # The window was closed: SIGHUP ends us.
            loop.remove_reader(keyboard)
        typed.put_nowait(keys)

    async def send() -> None:
        while keys := await typed.get():
            await terminal.write(keys)

    loop.add_reader(keyboard, read)
    try:
        async with _beside(send()):
            yield
    finally:
        loop.remove_reader(keyboard)


@contextlib.asynccontextmanager
async def _resizes(terminal: Terminal) -> AsyncIterator[None]:
    """Have the one there be as large as the one here."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    async def follow() -> None:
        while True:
            await changed.wait()
            changed.clear()
            size = window()
            await terminal.resize(cols=size.columns, rows=size.lines)

    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        async with _beside(follow()):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Work that goes on during the block and ends with it.

    When it fails, the output ends too, and says why: it is of the same connection.
    """
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            # Looked at, so that nobody is told that nobody did.
            task.exception()


def _show(piece: bytes) -> None:
    screen = sys.stdout.fileno()
    while piece:
        piece = piece[os.write(screen, piece) :]
