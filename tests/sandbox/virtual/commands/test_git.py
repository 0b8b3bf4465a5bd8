"""`git` is absent and explains what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox import virtual

if TYPE_CHECKING:
    from sandbox.virtual.commands.gnu import Run


async def test_git_explains_its_absence_and_the_alternative(run: Run) -> None:
    result = await run("git clone https://example.com/x")
    assert result.exit_code == 127
    assert "no git" in result.stderr and "diff -ru" in result.stderr


async def test_capabilities_omit_absent_commands() -> None:
    async with virtual() as sandbox:
        commands = (await sandbox.capabilities()).commands or frozenset()
    assert commands.isdisjoint({"git", "curl", "wget"})
    assert {"ls", "date", "zcat", "csplit", "html-to-markdown"} <= commands
