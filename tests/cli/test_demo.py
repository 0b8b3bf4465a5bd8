"""`smokebox demo`: the tour, and the shell after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.terminal import Open, Run


def test_tour_ends_without_a_terminal(run: Run) -> None:
    done = run("demo")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    assert "Lisbon 350" in done.stdout
    assert "# Best city: Lisbon 350" in done.stdout
    assert "(exit code 127)" in done.stdout
    assert "(exit code 124)" in done.stdout


def test_tour_continues_as_a_shell_in_a_terminal(open_terminal: Open) -> None:
    terminal = open_terminal("demo")
    terminal.expect(r"Your turn")
    terminal.expect(r"\$ ?$")
    terminal.type("cat report/summary.md")
    terminal.expect(r"\n# Best city: Lisbon 350\n")
    terminal.expect(r"\$ ?$")
    terminal.press("\x04")
    assert terminal.wait() == 0
