"""Shell in a sandbox of the server: attached to this terminal, or for one script."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from typing import TYPE_CHECKING

from smokebox.cli.remote import find_sandbox, print_output, run_with_client
from smokebox.errors import SandboxGone, SmokeboxError
from smokebox.foundation.signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

    from smokebox.client.client import Client
    from smokebox.client.terminal import Terminal

_CHUNK = 1 << 16
# Undoes what a killed program may have left on: the alternate screen, a hidden cursor, mouse
# and bracketed-paste reports.
_RESET = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\r\n"


def open_shell(id: str, env: dict[str, str]) -> int:
    """Run an interactive shell in this terminal, and return its exit code."""

    async def work(client: Client) -> int:
        sandbox, size = await find_sandbox(client, id), _window_size()
        terminal = await sandbox.create_terminal(
            cols=size.columns or 80,
            rows=size.lines or 24,
            env={"TERM": os.environ.get("TERM", "xterm"), **env},
        )
        gone = False
        try:
            return await _attach(terminal)
        except SandboxGone:
            # It ended with its server; a request to kill it would start the next one.
            gone = True
            raise
        finally:
            if not gone:
                with contextlib.suppress(SmokeboxError):
                    await terminal.kill()

    return run_with_client(work)


def run_script(
    id: str, script: str, env: dict[str, str], *, stdin: bytes | None, timeout: float | None
) -> int:
    """Run a script, stream its output, and return its exit code."""

    async def work(client: Client) -> int:
        sandbox = await find_sandbox(client, id)
        return await print_output(
            sandbox.exec_stream(script, env=env, stdin=stdin, timeout=timeout)
        )

    return run_with_client(work)


async def _attach(terminal: Terminal) -> int:
    """Connect this terminal to a remote one until its program ends; return the exit code.

    This terminal's settings are restored in any case.
    """
    with _raw_mode():
        try:
            async with _send_keys(terminal), _send_resizes(terminal):
                async for chunk in terminal:
                    _write_screen(chunk)
            return await terminal.wait()
        except BaseException:
            _write_screen(_RESET)
            raise


def _window_size() -> os.terminal_size:
    return os.get_terminal_size(sys.stdout.fileno())


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Deliver every key as a byte within the block, Ctrl-C included."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setraw(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextlib.asynccontextmanager
async def _send_keys(terminal: Terminal) -> AsyncIterator[None]:
    """Send typed keys to the remote terminal within the block."""
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    typed: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        try:
            keys = os.read(keyboard, _CHUNK)
        except OSError:
            keys = b""
        if not keys:
            # The window was closed: SIGHUP ends this process.
            loop.remove_reader(keyboard)
        typed.put_nowait(keys)

    async def send() -> None:
        while keys := await typed.get():
            await terminal.write(keys)

    loop.add_reader(keyboard, read)
    try:
        async with _background(send()):
            yield
    finally:
        loop.remove_reader(keyboard)


@contextlib.asynccontextmanager
async def _send_resizes(terminal: Terminal) -> AsyncIterator[None]:
    """Resize the remote terminal with this one within the block."""
    changed = asyncio.Event()

    async def follow() -> None:
        while True:
            await changed.wait()
            changed.clear()
            size = _window_size()
            await terminal.resize(cols=size.columns, rows=size.lines)

    with handle_signals((signal.SIGWINCH,), lambda _: changed.set()):
        async with _background(follow()):
            yield


@contextlib.asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run work during the block and cancel it at the end.

    An error in it is dropped: the output, on the same connection, ends with the same error.
    """
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            # Retrieved, or asyncio would log that it never was.
            task.exception()


def _write_screen(data: bytes) -> None:
    screen = sys.stdout.fileno()
    while data:
        data = data[os.write(screen, data) :]
