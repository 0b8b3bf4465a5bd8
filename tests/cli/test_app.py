"""The command as a whole: help, version, errors and how it starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox import __version__
from smokebox.cli.app import COMMANDS

if TYPE_CHECKING:
    from cli.terminal import Run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_version_is_the_version_of_the_package(run: Run) -> None:
    assert run("--version").stdout == f"smokebox {__version__}\n"


def test_version_needs_nothing_third_party() -> None:
    script = (
        "import sys; sys.argv = ['smokebox', '--version']\n"
        "from smokebox.cli import main; main(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {"typer", "rich", "bashkit"} & set(done.stdout.split())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_groups_commands_by_intent(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    work, _, setup = done.stdout.partition("Set up this machine:")
    assert done.returncode == 0
    assert "Work in a sandbox:\n  exec " in work
    assert "  doctor " in setup


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_command_has_help(run: Run, verb: str) -> None:
    done = run(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: smokebox {verb}" in done.stdout


def test_docs_page_lists_every_command() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z]+)`", row.split("|")[1])}
    assert set(COMMANDS) <= named


def test_help_imports_nothing_slow(run: Run) -> None:
    script = (
        "import sys; sys.argv = ['smokebox', '--help']\n"
        "from smokebox.cli import main; main(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    slow = {"rich", "bashkit", "asyncio", "prompt_toolkit", "aiohttp", "msgspec"}
    assert not slow & set(done.stdout.split())


def test_python_dash_m_runs_the_same_command() -> None:
    command = [sys.executable, "-m", "smokebox", "--version"]
    assert subprocess.check_output(command, text=True) == f"smokebox {__version__}\n"


def test_unknown_command_is_one_line_and_a_hint(run: Run) -> None:
    done = run("dcotor")
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("smokebox: No such command 'dcotor'.")
    assert second == "  See `smokebox --help`."


def test_unknown_option_names_the_nearest(run: Run) -> None:
    done = run("sh", "--lcal")
    assert done.returncode == 2
    assert "--local" in done.stderr


def test_traceback_is_shown_only_with_debug(run: Run) -> None:
    quiet, loud = run("sh", "--local", "missing"), run("--debug", "sh", "--local", "missing")
    assert (quiet.returncode, len(quiet.stderr.splitlines())) == (1, 1)
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr
    assert "PathNotFound" in loud.stderr


def test_closed_output_ends_quietly(run: Run) -> None:
    script = f"{sys.executable} -m smokebox doctor --json | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
