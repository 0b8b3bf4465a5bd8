"""Shell completion by typer: requests as its scripts send them, and a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from cli.served import Served
from cli.terminal import PATIENCE, SMOKEBOX

if TYPE_CHECKING:
    from pathlib import Path


def offered(served: Served, *words: str, cwd: Path | None = None) -> list[str]:
    request = {
        "_SMOKEBOX_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["smokebox", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [SMOKEBOX],
        env={**served.env, **request},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_are_offered(served: Served) -> None:
    assert offered(served, "st") == ["start", "stats", "status"]


def test_subcommands_are_offered(served: Served) -> None:
    assert offered(served, "keys", "") == ["create", "list", "revoke"]
    assert "--prefix" in offered(served, "keys", "create", "--")


def test_options_and_their_choices_are_offered(served: Served) -> None:
    assert offered(served, "ls", "--st") == ["--status"]
    assert offered(served, "ls", "--status", "") == ["idle", "active"]
    assert offered(served, "completion", "") == ["bash", "zsh", "fish"]


def test_sandbox_ids_are_offered(served: Served, box: str) -> None:
    for words in (["exec"], ["exec", "-w", "/tmp"], ["--debug", "sh"], ["rm", "other"]):
        assert offered(served, *words, box[:4]) == [box]
    assert offered(served, "rm", box, box) == []
    assert offered(served, "exec", box, box) == []
    assert offered(served, "cp", box) == [f"{box}:"]


def test_processes_of_the_named_sandbox_are_offered(served: Served, box: str) -> None:
    served.says("start", box, "--name", "web", "sleep 1000")
    assert offered(served, "logs", box, "") == ["web"]
    assert offered(served, "kill", box, "-s", "HUP", "w") == ["web"]
    assert offered(served, "kill", "missing", "") == []


def test_without_a_server_nothing_is_offered_and_none_is_started(tmp_path: Path) -> None:
    alone = Served(tmp_path)
    assert offered(alone, "exec", "") == []
    assert os.listdir(tmp_path) == []


def test_bash_completes(served: Served, box: str) -> None:
    script = (
        'eval "$(smokebox completion bash)"\n'
        f"COMP_WORDS=(smokebox info {box[:4]}); COMP_CWORD=2; _smokebox_completion smokebox\n"
        'echo "${COMPREPLY[@]}"'
    )
    env = {**served.env, "PATH": f"{os.path.dirname(SMOKEBOX)}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr) == (f"{box}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid_in_its_shell(served: Served, shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(served.says("completion", shell))
    assert f"_SMOKEBOX_COMPLETE=complete_{shell}" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True, timeout=PATIENCE)
