"""Progress of builds, as lines of a pipe and in a terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cli.terminal import SMOKEBOX, Terminal
from smokebox.cli.image_progress import ProgressPrinter
from smokebox.wire.builds import BuildEvent

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from cli.command_line import CommandLine

RECIPE = [
    BuildEvent(kind="step", step=1, steps=2, instruction="FROM recipe:base"),
    BuildEvent(kind="step", base="recipe:base", instruction="pull debian:trixie-slim"),
    BuildEvent(kind="done", base="recipe:base", instruction="pull", seconds=3.04),
    BuildEvent(kind="step", base="recipe:base", step=1, steps=5, instruction="RUN apt-get update"),
    BuildEvent(kind="output", base="recipe:base", step=1, steps=5, data="Get:1\nGet:2"),
    BuildEvent(kind="done", base="recipe:base", step=1, steps=5, seconds=12.34),
    BuildEvent(kind="done", step=1, steps=2, cached=True, seconds=15.41),
    BuildEvent(kind="step", step=2, steps=2, instruction="RUN curl -O x"),
    BuildEvent(kind="output", step=2, steps=2, data="  0%\r 50%\r100%\r\nlast"),
    BuildEvent(kind="output", step=2, steps=2, data=" line\n"),
    BuildEvent(kind="done", step=2, steps=2, seconds=0.2),
    BuildEvent(kind="image", steps=2, digest="sha256:0", names=("app:1",), seconds=15.6),
]
LINES = """\
[1/2] FROM recipe:base
recipe:base: pull debian:trixie-slim
recipe:base: DONE 3.0 s
recipe:base [1/5] RUN apt-get update
recipe:base [1/5]   Get:1
recipe:base [1/5]   Get:2
recipe:base [1/5] DONE 12.3 s
[1/2] DONE 15.4 s
[2/2] RUN curl -O x
[2/2]     0%
[2/2]    50%
[2/2]   100%
[2/2]   last line
[2/2] DONE 0.2 s
built app:1 in 15.6 s
"""


def show(style: str) -> None:
    with ProgressPrinter(style) as printer:
        for event in RECIPE:
            printer.show(event)


def test_a_pipe_gets_whole_lines_with_the_step_and_the_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show("plain")
    assert capsys.readouterr() == ("", LINES)


def test_json_has_a_line_for_each_event_and_quiet_none(capsys: pytest.CaptureFixture[str]) -> None:
    show("json")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["base"], one["step"]) for one in events[:3]] == [
        ("", 1),
        ("recipe:base", 0),
        ("recipe:base", 0),
    ]
    show("quiet")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_time_of_a_silent_step(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM host\nRUN sleep 3.5\nRUN exit 5\n")
    terminal = Terminal([SMOKEBOX, "images", "build", str(tmp_path)], tmp_path, cli.env)
    terminal.expect(r"\[2/3\] RUN sleep 3.5\n")
    terminal.expect(r"\[2/3\] RUN sleep 3.5 [12] s")
    terminal.expect(r"\[2/3\] RUN sleep 3.5 3 s")
    terminal.expect(r"\[2/3\] DONE 3.\d s\n\[3/3\] RUN exit 5\n")
    terminal.expect(r"^smokebox: .*ended with exit code 5")
    # The line goes before the next one is printed.
    assert "3 s\x1b[0m\r\x1b[K[2/3] DONE" in terminal.seen
    assert terminal.wait() == 1
