"""What becomes of an output whose whole cannot be kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox import ExecResult
from smokebox.agents.tools.output import CommandOutput, OutputFiles

if TYPE_CHECKING:
    from agents.tools.workspace import Workspace

DONE = ExecResult(exit_code=0)


async def test_a_file_that_cannot_be_written_is_told(host: Workspace) -> None:
    output = CommandOutput()
    output.add("x\n" * 3000)
    shown = await output.shown(OutputFiles(host.sandbox, "/proc/none"), DONE)
    assert "The rest could not be kept: " in shown
    assert shown.count("x") > 2000


async def test_files_that_the_sandbox_kept_are_named_instead(work: Workspace) -> None:
    output = CommandOutput()
    output.add("x\n" * 3000)
    kept = ExecResult(exit_code=0, stdout_file="/spill/out", stderr_file="/spill/err")
    shown = await output.shown(OutputFiles(work.sandbox, "/tmp"), kept)
    assert "The output is in /spill/out, standard error in /spill/err.]" in shown


async def test_many_small_pieces_make_one_whole(work: Workspace) -> None:
    output = CommandOutput()
    for letter in "aé\n€😀":
        output.add(letter)
    assert await output.shown(OutputFiles(work.sandbox, "/tmp"), DONE) == "aé\n€😀"
