"""What verbs import that talk to a server: little, as it is most of the time that they take."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cli.terminal import PATIENCE, Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from cli.served import Served

# Runs a command line, and writes last which modules it needed.
SCRIPT = (
    "import sys\n"
    "from smokebox.cli import main\n"
    "code = main()\n"
    "print('\\nneeded', *sorted(sys.modules), '.', flush=True)\n"
    "sys.exit(code)"
)
# Each takes longer to import than a server takes to answer, most of them ten times as long.
SLOW = {
    "aiohttp",
    "bashkit",
    "cryptography",
    "http.client",
    "prompt_toolkit",
    "rich",
    "secrets",
    "smokebox.egress.serving",
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
def test_a_verb_needs_nothing_slow(
    served: Served, box: str, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "file").write_text("hello")
    process = served.says("start", box, "echo", "hello").strip()
    named = {"BOX": box, "PROCESS": process, "HERE": str(tmp_path)}
    for name, value in named.items():
        words = [word.replace(name, value) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        env=served.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not SLOW & set(done.stdout.partition("\nneeded")[2].split())
    assert "websockets" not in done.stdout


def test_a_shell_in_a_terminal_needs_no_more_than_its_websocket(
    served: Served, box: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SCRIPT, "sh", box]
    terminal = Terminal(command, tmp_path, served.env)
    try:
        terminal.expect(r"[#$] ")
        terminal.type("exit")
        terminal.expect(r"\nneeded")
        needed = terminal.expect(r" \.\n").split()
    finally:
        terminal.close()
    assert "websockets" in needed
    # The library of WebSockets needs these, the first for proxies.
    assert not SLOW - {"http.client", "secrets"} & set(needed)
