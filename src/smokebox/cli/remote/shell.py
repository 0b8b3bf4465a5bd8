"""A shell in a sandbox of the server: with this terminal, or for one script."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from smokebox.cli.remote.console import lend, window
from smokebox.cli.remote.finding import find
from smokebox.cli.remote.running import show
from smokebox.cli.remote.talking import talk
from smokebox.errors import SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from smokebox.client.client import Client


def open_shell(id: str, env: dict[str, str]) -> int:
    """Run an interactive shell in this terminal, and give its exit code."""

    async def work(client: Client) -> int:
        sandbox, size = await find(client, id), window()
        terminal = await sandbox.create_terminal(
            cols=size.columns or 80,
            rows=size.lines or 24,
            env={"TERM": os.environ.get("TERM", "xterm"), **env},
        )
        gone = False
        try:
            return await lend(terminal)
        except SandboxGone:
            # It ended with its server; to ask for its end would start the next one.
            gone = True
            raise
        finally:
            if not gone:
                with contextlib.suppress(SmokeboxError):
                    await terminal.kill()

    return talk(work)


def run_script(
    id: str, script: str, env: dict[str, str], *, stdin: bytes | None, timeout: float | None
) -> int:
    """Run a script with its output shown here, and give its exit code."""

    async def work(client: Client) -> int:
        sandbox = await find(client, id)
        return await show(sandbox.exec_stream(script, env=env, stdin=stdin, timeout=timeout))

    return talk(work)
