"""Shell completion by typer: requests as its scripts send them, and a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from cli.command_line import CommandLine
from cli.terminal import SMOKEBOX, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path


def offered(cli: CommandLine, *words: str, cwd: Path | None = None) -> list[str]:
    request = {
        "_SMOKEBOX_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["smokebox", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [SMOKEBOX],
        env={**cli.env, **request},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_are_offered(cli: CommandLine) -> None:
    assert offered(cli, "st") == ["start", "stats", "status"]


def test_subcommands_are_offered(cli: CommandLine) -> None:
    assert offered(cli, "keys", "") == ["create", "ls", "show", "revoke"]
    assert "--prefix" in offered(cli, "keys", "create", "--")


def test_options_and_their_choices_are_offered(cli: CommandLine) -> None:
    assert offered(cli, "ls", "--st") == ["--status"]
    assert offered(cli, "ls", "--status", "") == ["idle", "active"]
    assert offered(cli, "completion", "") == ["bash", "zsh", "fish"]


def test_sandbox_ids_are_offered(cli: CommandLine, sandbox: str) -> None:
    for words in (["exec"], ["exec", "-w", "/tmp"], ["--debug", "sh"], ["rm", "other"]):
        assert offered(cli, *words, sandbox[:4]) == [sandbox]
    assert offered(cli, "rm", sandbox, sandbox) == []
    assert offered(cli, "exec", sandbox, sandbox) == []
    assert offered(cli, "cp", sandbox) == [f"{sandbox}:"]


def test_processes_of_the_named_sandbox_are_offered(cli: CommandLine, sandbox: str) -> None:
    cli.output("start", sandbox, "--name", "web", "sleep 1000")
    assert offered(cli, "logs", sandbox, "") == ["web"]
    assert offered(cli, "kill", sandbox, "-s", "HUP", "w") == ["web"]
    assert offered(cli, "kill", "missing", "") == []


def test_without_a_server_nothing_is_offered_and_none_is_started(tmp_path: Path) -> None:
    fresh = CommandLine(tmp_path)
    assert offered(fresh, "exec", "") == []
    assert os.listdir(tmp_path) == []


def test_bash_completes(cli: CommandLine, sandbox: str) -> None:
    script = (
        'eval "$(smokebox completion bash)"\n'
        f"COMP_WORDS=(smokebox info {sandbox[:4]}); COMP_CWORD=2; _smokebox_completion smokebox\n"
        'echo "${COMPREPLY[@]}"'
    )
    env = {**cli.env, "PATH": f"{os.path.dirname(SMOKEBOX)}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (done.stdout, done.stderr) == (f"{sandbox}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid_in_its_shell(cli: CommandLine, shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(cli.output("completion", shell))
    assert f"_SMOKEBOX_COMPLETE=complete_{shell}" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True, timeout=TIMEOUT)
