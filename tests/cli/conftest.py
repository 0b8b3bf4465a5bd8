"""Fixtures that run the `smokebox` command: in this process, as a process, in a terminal."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cli.command_line import CommandLine
from cli.terminal import SMOKEBOX, TIMEOUT, WITHOUT_PROMPT_TOOLKIT, Open, Run, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `smokebox` with arguments in an empty directory."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SMOKEBOX, *arguments],
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    return run


@pytest.fixture(params=["prompt_toolkit", "readline"])
def open_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Open terminals that run `smokebox`, with prompt_toolkit or readline."""
    first = [SMOKEBOX] if request.param == "prompt_toolkit" else []
    opened: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        command = first or [sys.executable, "-c", WITHOUT_PROMPT_TOOLKIT]
        opened.append(Terminal([*command, *arguments], tmp_path))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.close()


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Yield the command line with a server that the tests of a module share."""
    cli = CommandLine(tmp_path_factory.mktemp("home"))
    cli.output("up")
    yield cli
    cli.run("down")


@pytest.fixture
def sandbox(cli: CommandLine) -> Iterator[str]:
    """Yield the id of an existing sandbox."""
    id = f"box-{next(_NUMBERS)}"
    assert cli.output("create", id) == f"{id}\n"
    yield id
    cli.run("rm", "--force", id)


_NUMBERS = itertools.count(1)
