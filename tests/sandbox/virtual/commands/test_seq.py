"""`seq` counts as GNU seq does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare, Run

SCRIPTS = [
    'seq 0', 'seq 3 1', 'seq 1 2', 'seq -5 -1', 'seq 10 -3 1', 'seq 1 0.1 1.5', 'seq 1.00 3',
    'seq -w 1 100 | tail -1', 'seq -w -5 5', "seq -s ' ' 3", "seq -s '' 3", "seq -f 'n%02.0f' 3",
    'seq --separator=: 3', 'seq x; echo $?', 'seq; echo $?', 'seq 1 2 3 4; echo $?',
    'seq 1 0 5; echo $?', 'seq 1000000 | tail -1', 'seq -3', 'seq 3 | tac', 'seq 1e3 | tail -1',
    'seq 1 3 | paste -sd+', 'seq 5 1', 'for i in $(seq 3); do echo n$i; done', 'seq -s, 1 2 9',
    'seq 10 | head -3',
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_seq_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)


async def test_million_numbers_are_printed(run: Run) -> None:
    result = await run("seq 1000000 | wc -l")
    assert result.stdout == "1000000\n"


async def test_output_over_the_shell_limit_is_an_error_not_a_partial_result(run: Run) -> None:
    result = await run("seq 1000000000; echo $?")
    assert result.stdout == "1\n"
    assert "more than" in result.stderr
