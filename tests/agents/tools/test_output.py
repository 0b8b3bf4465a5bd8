"""Tests of truncated output: by bytes, never inside a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import ExecResult
from smokebox.agents.tools.output import (
    MAX_BYTES,
    OutputBuffer,
    OutputFiles,
    count_fitting,
    head,
    one_line,
    shell_word,
    shorten_line,
    tail,
)

if TYPE_CHECKING:
    from agents.tools.workspace import Workspace

DONE = ExecResult(exit_code=0)
MIXED = "aé€😀" * 5


@pytest.mark.parametrize("limit", range(len(MIXED.encode()) + 2))
def test_head_and_tail_keep_whole_characters(limit: int) -> None:
    data = MIXED.encode()
    for part in (head(data, limit), tail(data, limit)):
        assert part.decode() in MIXED
        assert limit - 3 <= len(part) <= limit or part == data


def test_bytes_that_are_not_utf8_are_cut_near_the_limit() -> None:
    assert len(head(b"\x80" * 100, 50)) >= 47
    assert len(tail(b"\x80" * 100, 50)) >= 47


def test_line_is_shortened_by_bytes() -> None:
    assert shorten_line("é" * 250) == "é" * 250
    assert shorten_line("é" * 251) == "é" * 250 + "..."
    assert shorten_line("a" + "é" * 250) == "a" + "é" * 249 + "..."


def test_line_breaks_count_towards_the_limit() -> None:
    half = MAX_BYTES // 2
    assert count_fitting([b"x" * half, b"x" * half], 10) == 1
    assert count_fitting([b"x" * half, b"x" * (half - 1)], 10) == 2
    assert count_fitting([b"x"] * 5, 3) == 3
    assert count_fitting([b"x" * (MAX_BYTES + 1)], 3) == 0
    assert count_fitting(["é" * (half // 2)] * 2, 10) == 1


def test_path_with_line_break_is_quoted() -> None:
    assert one_line("it's ünï.txt") == "it's ünï.txt"
    assert one_line("a\nb") == '"a\\nb"'


def test_shell_word_quotes_any_path() -> None:
    assert shell_word("a b") == "'a b'"
    assert shell_word("-n") == "./-n"


async def test_output_file_that_cannot_be_written_is_reported(host: Workspace) -> None:
    output = OutputBuffer()
    output.add("x\n" * 3000)
    shown = await output.render(OutputFiles(host.sandbox, "/proc/none"), DONE)
    assert "The rest could not be kept: " in shown
    assert shown.count("x") > 2000


async def test_files_of_the_sandbox_are_named_instead(work: Workspace) -> None:
    output = OutputBuffer()
    output.add("x\n" * 3000)
    result = ExecResult(exit_code=0, stdout_file="/spill/out", stderr_file="/spill/err")
    shown = await output.render(OutputFiles(work.sandbox, "/tmp"), result)
    assert "The output is in /spill/out, standard error in /spill/err.]" in shown


async def test_small_chunks_are_joined(work: Workspace) -> None:
    output = OutputBuffer()
    for letter in "aé\n€😀":
        output.add(letter)
    assert await output.render(OutputFiles(work.sandbox, "/tmp"), DONE) == "aé\n€😀"
