"""Imports of commands that use a server: few, as they take most of the time."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cli.terminal import TIMEOUT, Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from cli.command_line import CommandLine

# Runs a command line, then prints the modules that it imported.
SCRIPT = (
    "import sys\n"
    "from smokebox.cli import main\n"
    "code = main()\n"
    "print('\\nneeded', *sorted(sys.modules), '.', flush=True)\n"
    "sys.exit(code)"
)
# Each takes longer to import than a server takes to respond, most of them ten times as long.
SLOW = {
    "aiohttp",
    "bashkit",
    "cryptography",
    "http.client",
    "prompt_toolkit",
    "rich",
    "secrets",
    "smokebox.egress.handler_server",
    "starlette",
    "tomllib",
    "yarl",
}


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["info", "BOX"],
        ["stats", "BOX"],
        ["ps", "BOX"],
        ["exec", "BOX", "echo", "hello"],
        ["sh", "BOX", "-c", "echo hello"],
        ["logs", "BOX", "PROCESS"],
        ["logs", "-f", "BOX", "PROCESS"],
        ["kill", "BOX", "PROCESS"],
        ["cp", "BOX:/etc/hostname", "-"],
        ["cp", "BOX:/etc/hostname", "HERE/copy"],
        ["cp", "HERE/file", "BOX:/tmp/file"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_command_imports_nothing_slow(
    cli: CommandLine, sandbox: str, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "file").write_text("hello")
    process = cli.output("start", sandbox, "echo", "hello").strip()
    named = {"BOX": sandbox, "PROCESS": process, "HERE": str(tmp_path)}
    for name, value in named.items():
        words = [word.replace(name, value) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        env=cli.env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not SLOW & set(done.stdout.partition("\nneeded")[2].split())
    assert "websockets" not in done.stdout


def test_interactive_shell_imports_only_websockets_besides(
    cli: CommandLine, sandbox: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, "sh", sandbox]
    terminal = Terminal(command, tmp_path, cli.env)
    try:
        terminal.expect(r"[#$] ")
        terminal.type("exit")
        terminal.expect(r"\nneeded")
        needed = terminal.expect(r" \.\n").split()
    finally:
        terminal.close()
    assert "websockets" in needed
    # The WebSocket library imports these, the first for proxies.
    assert not SLOW - {"http.client", "secrets"} & set(needed)
