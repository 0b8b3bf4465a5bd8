"""`smokebox sh` in a real terminal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cli.terminal import Open

PROMPT = r"(?:local|virtual|bucket):\S+\$ ?$"
SANDBOXES = [
    pytest.param([], id="virtual"),
    pytest.param(["--local"], id="local"),
    pytest.param(["--bucket", "memory:///"], id="bucket"),
]


@pytest.mark.parametrize("options", SANDBOXES)
def test_commands_run_one_after_another(open_terminal: Open, options: list[str]) -> None:
    terminal = open_terminal("sh", *options)
    terminal.expect(PROMPT)
    terminal.type("echo $((40 + 2))")
    assert "\n42\n" in terminal.expect(PROMPT)
    terminal.type("printf '%s-' a b")
    assert "\na-b-\n" in terminal.expect(PROMPT)


@pytest.mark.parametrize("options", SANDBOXES)
def test_directory_is_kept(open_terminal: Open, options: list[str]) -> None:
    terminal = open_terminal("sh", *options)
    terminal.expect(PROMPT)
    terminal.type("mkdir -p 'a b/c' && cd 'a b'")
    terminal.expect(r"/a b\$ ?$")
    terminal.type("cd c; (exit 7)")
    terminal.expect(r"\n\[7\] \w+:\S+/a b/c\$ ?$")
    terminal.type("cd - > /dev/null")
    terminal.expect(r"\n\w+:\S+/a b\$ ?$")


def test_exit_status_is_kept_on_the_host(open_terminal: Open) -> None:
    terminal = open_terminal("sh", "--local")
    terminal.expect(PROMPT)
    terminal.type("(exit 7)")
    terminal.expect(r"\[7\] " + PROMPT)
    terminal.type("echo was=$?")
    terminal.expect(r"\nwas=7\n")


@pytest.mark.parametrize("options", SANDBOXES)
def test_ctrl_c_stops_the_command_and_not_the_shell(
    open_terminal: Open, options: list[str]
) -> None:
    terminal = open_terminal("sh", *options)
    terminal.expect(PROMPT)
    terminal.type("echo started=$((1 + 1)); sleep 1000")
    terminal.expect("started=2")
    terminal.interrupt()
    terminal.expect(r"\n\[130\] " + PROMPT)
    terminal.type("echo alive=$((1 + 1))")
    terminal.expect("alive=2")


@pytest.mark.parametrize("options", SANDBOXES)
def test_ctrl_c_stops_a_busy_loop(open_terminal: Open, options: list[str]) -> None:
    terminal = open_terminal("sh", *options)
    terminal.expect(PROMPT)
    terminal.type("echo started=$((1 + 1)); while :; do :; done")
    terminal.expect("started=2")
    terminal.interrupt()
    terminal.expect(r"\n\[130\] " + PROMPT)


def test_ctrl_c_at_the_prompt_drops_the_line(open_terminal: Open) -> None:
    terminal = open_terminal("sh", "--local")
    terminal.expect(PROMPT)
    terminal.press("touch dropped")
    terminal.expect("touch dropped$")
    terminal.interrupt()
    terminal.expect(r"\[130\] " + PROMPT)
    terminal.type("ls | wc -l")
    terminal.expect(r"\n0\n")


def test_command_continues_on_the_next_lines(open_terminal: Open) -> None:
    terminal = open_terminal("sh", "--local")
    terminal.expect(PROMPT)
    for line in ("for i in 1 2; do", "cat <<END", "it's $i", "END"):
        terminal.type(line)
        terminal.expect(r"\n> ?\x08?$")
    terminal.type("done")
    assert terminal.expect(PROMPT).count("it's") >= 2


def test_history_outlives_the_shell(open_terminal: Open, tmp_path: Path) -> None:
    first = open_terminal("sh", "--local")
    first.expect(PROMPT)
    first.type("echo remembered")
    first.expect(r"\nremembered\n")
    first.expect(PROMPT)
    first.press("\x04")
    assert first.wait() == 0
    second = open_terminal("sh", "--local")
    second.expect(PROMPT)
    second.press("\x1b[A")
    second.expect("echo remembered")
    second.press("\r")
    second.expect(r"\nremembered\n")


@pytest.mark.parametrize(("word", "code"), [("exit 5", 5), ("exit", 1), ("\x04", 1)])
def test_exit_returns_the_exit_code(open_terminal: Open, word: str, code: int) -> None:
    terminal = open_terminal("sh", "--local")
    terminal.expect(PROMPT)
    terminal.type("false")
    terminal.expect(r"\[1\] " + PROMPT)
    terminal.press(word if word == "\x04" else f"{word}\r")
    assert terminal.wait() == code


def test_closed_terminal_kills_the_command(open_terminal: Open) -> None:
    terminal = open_terminal("sh", "--local")
    terminal.expect(PROMPT)
    terminal.type("echo pid=$$; sleep 1000")
    pid = terminal.expect(r"pid=\d+\n").split("pid=")[-1].strip()
    os.kill(terminal.process.pid, signal.SIGHUP)
    assert terminal.wait() == 128 + signal.SIGHUP
    assert not Path(f"/proc/{pid}").exists()


def test_removed_directory_leaves_the_shell_in_its_parent(
    open_terminal: Open, tmp_path: Path
) -> None:
    terminal = open_terminal("sh", "--local")
    terminal.expect(PROMPT)
    terminal.type("mkdir gone && cd gone && rmdir ../gone")
    terminal.expect(r"/gone\$ ?$")
    terminal.type("pwd")
    terminal.expect(rf"\n{tmp_path}\n")
    terminal.expect(PROMPT)


def test_no_color_disables_colours(open_terminal: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = open_terminal("sh", "--local")
    terminal.expect(PROMPT)
    assert "\x1b[32m" not in terminal.seen
