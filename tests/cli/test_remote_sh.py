"""`smokebox sh ID`: a shell in a sandbox of the server, in a real terminal and without one."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from cli.command_line import wait_until
from cli.terminal import SMOKEBOX, TIMEOUT, Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cli.command_line import CommandLine


@pytest.fixture
def open_shell(cli: CommandLine, sandbox: str, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Open a terminal with a shell in the sandbox, and wait for its prompt."""
    opened: list[Terminal] = []

    def open_shell(*arguments: str) -> Terminal:
        words = ["sh", sandbox, *arguments]
        opened.append(Terminal([SMOKEBOX, *words], tmp_path, cli.env))
        opened[-1].expect(r"[#$] ")
        return opened[-1]

    yield open_shell
    for terminal in opened:
        terminal.close()


def test_exit_code_passes_through_and_the_terminal_is_restored(
    open_shell: Callable[..., Terminal],
) -> None:
    terminal = open_shell()
    terminal.type("echo $((6 * 7))")
    terminal.expect(r"\n42\n")
    assert not terminal.echoes()
    terminal.type("exit 7")
    assert terminal.process.wait(TIMEOUT) == 7
    assert terminal.echoes()


def test_ctrl_c_stops_the_remote_command_and_not_the_shell(
    open_shell: Callable[..., Terminal],
) -> None:
    terminal = open_shell()
    # Printed by the child itself: bash misses a Ctrl-C while it hands the terminal over.
    terminal.type("sh -c 'echo star\"\"ted; exec sleep 1000'")
    terminal.expect("started\n")
    terminal.press("\x03")
    terminal.expect(r"[#$] ")
    terminal.type("echo code $?")
    terminal.expect("code 130\n")
    terminal.expect(r"[#$] ")
    terminal.press("\x04")
    assert terminal.wait() == 0


def test_remote_window_size_follows_this_terminal(open_shell: Callable[..., Terminal]) -> None:
    terminal = open_shell()
    terminal.type("stty size")
    terminal.expect("\n40 200\n")
    terminal.resize(cols=100, rows=30)
    terminal.type("until [ \"$(stty size)\" = '30 100' ]; do sleep 0.02; done; echo fi''ts")
    terminal.expect("fits\n")


def test_variables_and_term_are_passed_on(
    open_shell: Callable[..., Terminal],
) -> None:
    terminal = open_shell("-e", "A=x y")
    terminal.type('echo "<$A:$TERM>"')
    terminal.expect("<x y:xterm>")


def test_large_output_is_complete(open_shell: Callable[..., Terminal]) -> None:
    terminal = open_shell()
    terminal.type("seq 20000 | md5sum; seq 20000; echo do''ne")
    seen = terminal.expect("done\n")
    assert "\n19999\n20000\n" in seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_remote_shell_and_restores_the_terminal(
    cli: CommandLine, sandbox: str, open_shell: Callable[..., Terminal], number: signal.Signals
) -> None:
    terminal = open_shell()
    terminal.type("echo star''ted; sleep 4321")
    terminal.expect("started\n")
    terminal.process.send_signal(number)
    assert terminal.process.wait(TIMEOUT) == 128 + number
    assert terminal.echoes()
    wait_until(lambda: cli.run("exec", sandbox, "pgrep -f 'sleep 432[1]'").returncode == 1)


def test_killed_server_restores_the_terminal(
    cli: CommandLine, open_shell: Callable[..., Terminal]
) -> None:
    terminal = open_shell()
    os.kill(json.loads(cli.output("status", "--json"))["pid"], signal.SIGKILL)
    terminal.expect("smokebox: the connection to the server was lost")
    assert terminal.process.wait(TIMEOUT) == 1
    assert terminal.echoes()
    assert cli.output("up")


def test_without_a_terminal_the_script_on_stdin_is_run(cli: CommandLine, sandbox: str) -> None:
    done = cli.run("sh", sandbox, stdin="echo out; echo err >&2\nexit 4\n")
    assert (done.returncode, done.stdout, done.stderr) == (4, "out\n", "err\n")


def test_command_option_runs_in_the_remote_sandbox(cli: CommandLine, sandbox: str) -> None:
    words = ["-e", "A=1", "-i", "-c", "echo $A; cat; exit 3"]
    done = cli.run("sh", sandbox, *words, stdin="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\nin\n", "")
    done = cli.run("sh", sandbox, "--timeout", "0.5", "-c", "sleep 1000")
    assert done.returncode == 124


def test_id_and_bucket_exclude_each_other(cli: CommandLine) -> None:
    done = cli.run("sh", "x", "--bucket", "memory:///")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ID and --bucket exclude each other" in done.stderr
