"""Completion: what a shell offers, asked as the scripts ask, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from cli.served import Served
from cli.terminal import PATIENCE, SMOKEBOX
from smokebox.cli.completion.completion import SCRIPTS

if TYPE_CHECKING:
    from pathlib import Path


def offered(served: Served, *words: str) -> list[str]:
    lines = served.says("complete", "--", *words).splitlines()
    return [line.partition("\t")[0] for line in lines]


def test_verbs_are_offered_with_what_they_do(served: Served) -> None:
    assert offered(served, "st") == ["start", "stats", "status"]
    assert "exec\tRun a command in a sandbox.\n" in served.says("complete", "--", "")
    assert "complete" not in offered(served, "")


def test_verbs_of_a_verb_are_offered(served: Served) -> None:
    assert offered(served, "keys", "") == ["create", "list", "revoke"]
    assert "--prefix" in offered(served, "keys", "create", "--")


def test_options_and_their_choices_are_offered(served: Served) -> None:
    assert offered(served, "ls", "--st") == ["--status"]
    assert offered(served, "ls", "--status", "") == ["idle", "active"]
    assert offered(served, "completion", "") == ["bash", "zsh", "fish"]


def test_ids_are_offered_where_a_sandbox_goes(served: Served, box: str) -> None:
    for words in (["exec"], ["exec", "-w", "/tmp"], ["--debug", "sh"], ["rm", "other"]):
        assert offered(served, *words, box[:4]) == [box]
    assert offered(served, "rm", box, box) == []
    assert offered(served, "exec", box, box) == []
    assert offered(served, "cp", box) == [f"{box}:"]


def test_processes_are_offered_after_their_sandbox(served: Served, box: str) -> None:
    served.says("start", box, "--name", "web", "sleep 1000")
    assert offered(served, "logs", box, "") == ["web"]
    assert offered(served, "kill", box, "-s", "HUP", "w") == ["web"]
    assert offered(served, "kill", "nobody", "") == []


def test_without_a_server_nothing_is_offered_and_none_is_started(tmp_path: Path) -> None:
    alone = Served(tmp_path)
    assert offered(alone, "exec", "") == []
    assert os.listdir(tmp_path) == []


def test_bash_completes(served: Served, box: str) -> None:
    script = (
        'eval "$(smokebox completion bash)"\n'
        f'COMP_WORDS=(smokebox info {box[:4]}); COMP_CWORD=2; _smokebox; echo "${{COMPREPLY[@]}}"'
    )
    env = {**served.env, "PATH": f"{os.path.dirname(SMOKEBOX)}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr) == (f"{box}\n", "")


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_is_one_that_its_shell_can_read(served: Served, shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(served.says("completion", shell))
    assert "smokebox complete --" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True, timeout=PATIENCE)
