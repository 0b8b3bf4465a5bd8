"""`smokebox doctor` on this machine, and with missing programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from cli.terminal import SMOKEBOX

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Run


def checks_by_name(env: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [SMOKEBOX, "doctor", "--json"],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return {check["name"]: check for check in json.loads(done.stdout)}


def test_required_checks_pass_on_this_machine(run: Run) -> None:
    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python            {sys.version.split()[0]}" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_has_name_status_and_fix() -> None:
    checks = checks_by_name().values()
    assert {check["status"] for check in checks} <= {"ok", "optional"}
    assert all(check["fix"] for check in checks if check["status"] != "ok")
    assert not any(check["fix"] for check in checks if check["status"] == "ok")


def test_missing_program_has_an_install_command(tmp_path: Path) -> None:
    (tmp_path / "apt-get").touch(mode=0o755)
    git = checks_by_name({"PATH": str(tmp_path)})["git"]
    assert (git["status"], git["fix"]) == ("optional", "apt-get install -y git")


def test_missing_requirement_exits_with_1() -> None:
    # With little address space, no thread can have the stack that scripts need.
    command = f"ulimit -v 1000000; exec {sys.executable} -m smokebox doctor"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "missing  thread stacks" in done.stdout
    assert "fix: ulimit -v unlimited" in done.stdout
