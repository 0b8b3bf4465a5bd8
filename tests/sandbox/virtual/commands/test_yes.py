"""`yes` writes for as long as its output is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Compare, Run

SCRIPTS = [
    "yes | head -2", "yes a b | head -2", "yes | head -50000 | wc -l", "yes -- -n | head -1",
    "yes | head -c 300000 | wc -c", "yes '' | head -2",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
async def test_yes_matches_gnu(script: str, same_as_gnu: Compare) -> None:
    await same_as_gnu(script)


async def test_yes_ends_silently_when_its_reader_exits(run: Run) -> None:
    result = await run("yes | head -1; echo ${PIPESTATUS[0]}")
    assert (result.stdout, result.stderr) == ("y\n141\n", "")
