"""There is no git, and it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox import virtual

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Run


async def test_git_says_that_there_is_none_and_what_to_use(run: Run) -> None:
    result = await run("git clone https://example.com/x")
    assert result.exit_code == 127
    assert "no git" in result.stderr and "diff -ru" in result.stderr


async def test_what_is_absent_is_not_among_the_capabilities() -> None:
    async with virtual() as sandbox:
        commands = (await sandbox.capabilities()).commands or frozenset()
    assert commands.isdisjoint({"git", "curl", "wget"})
    assert {"ls", "date", "zcat", "csplit", "html-to-markdown"} <= commands
