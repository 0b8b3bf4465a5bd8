"""Runs the real command line: as a process, and in a real terminal."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cli.served import Served
from cli.terminal import PATIENCE, SMOKEBOX, WITHOUT_PROMPT_TOOLKIT, Open, Run, Terminal

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
            timeout=PATIENCE,
            check=False,
        )

    return run


@pytest.fixture(params=["prompt_toolkit", "readline"])
def open_terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Open terminals that run `smokebox`, with either way to read a line."""
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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield the command line with a server that the tests of a module share."""
    served = Served(tmp_path_factory.mktemp("home"))
    served.says("up")
    yield served
    served.run("down")


@pytest.fixture
def box(served: Served) -> Iterator[str]:
    """Yield the id of an existing sandbox."""
    id = f"box-{next(_NUMBERS)}"
    assert served.says("create", id) == f"{id}\n"
    yield id
    served.run("rm", "--force", id)


_NUMBERS = itertools.count(1)
