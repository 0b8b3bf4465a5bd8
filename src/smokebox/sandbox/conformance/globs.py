"""Cases on glob: wildcards, hidden names and the form of results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.sandbox.conformance.cases import Cases

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import Capabilities

FILES = ("a.py", "b.py", "c.txt", ".hidden.py", "src/d.py", "src/deep/er/e.py", ".git/f.py")


class GlobCases(Cases):
    """One tree, many patterns."""

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*.py", ["a.py", "b.py"]),
            ("?.txt", ["c.txt"]),
            ("[ab].py", ["a.py", "b.py"]),
            ("[!a].py", ["b.py"]),
            ("*.{py,txt}", ["a.py", "b.py", "c.txt"]),
            (".*.py", [".hidden.py"]),
            ("src/*.py", ["src/d.py"]),
            ("*/d.py", ["src/d.py"]),
            ("**/*.py", ["a.py", "b.py", "src/d.py", "src/deep/er/e.py"]),
            ("src/**/*.py", ["src/d.py", "src/deep/er/e.py"]),
            ("src/**/e.py", ["src/deep/er/e.py"]),
            ("c.txt", ["c.txt"]),
            ("src", ["src"]),
            ("*.rs", []),
            ("nope/*.py", []),
        ],
    )
    async def test_pattern(
        self, sandbox: SandboxApi, place: str, pattern: str, expected: list[str]
    ) -> None:
        for name in FILES:
            await sandbox.write_file(f"{place}/{name}", "")
        found = await sandbox.glob(pattern, cwd=place)
        assert found == [f"{place}/{name}" for name in expected]

    async def test_hidden_names_on_request(self, sandbox: SandboxApi, place: str) -> None:
        for name in FILES:
            await sandbox.write_file(f"{place}/{name}", "")
        found = await sandbox.glob("**/*.py", cwd=place, hidden=True)
        assert found == sorted(f"{place}/{name}" for name in FILES if name.endswith(".py"))

    async def test_directories_match_unless_only_files_are_wanted(
        self, sandbox: SandboxApi, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/d/f", "")
        assert await sandbox.glob("**", cwd=place) == [f"{place}/d", f"{place}/d/f"]
        assert await sandbox.glob("**", cwd=place, files_only=True) == [f"{place}/d/f"]

    async def test_an_absolute_pattern(self, sandbox: SandboxApi, place: str) -> None:
        await sandbox.write_file(f"{place}/f.md", "")
        assert await sandbox.glob(f"{place}/*.md") == [f"{place}/f.md"]

    async def test_links_to_directories_are_not_descended(
        self, sandbox: SandboxApi, able: Capabilities, place: str
    ) -> None:
        await sandbox.write_file(f"{place}/d/f.md", "")
        if able.symlinks:
            await sandbox.exec("ln -s .. d/up", cwd=place)
        assert await sandbox.glob("**/*.md", cwd=place) == [f"{place}/d/f.md"]
