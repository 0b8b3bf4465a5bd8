"""Tests of the glob tool, and of patterns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.agents.tools.glob import matches

if TYPE_CHECKING:
    from pathlib import Path

    from agents.tools.workspace import Workspace


@pytest.fixture
async def tree(work: Workspace) -> Workspace:
    for name in ("a.py", "b.ts", "src/c.py", "src/deep/d.py", ".hidden/e.py", "src/.f.py"):
        await work.sandbox.write_file(name, "x")
    return work


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", "a.py"),
        ("**/*.py", "a.py\nsrc/c.py\nsrc/deep/d.py"),
        ("src/*", "src/c.py"),
        ("*.{py,ts}", "a.py\nb.ts"),
        (".hidden/*", ".hidden/e.py"),
        ("[ab].*", "a.py\nb.ts"),
        ("src", "No files found matching pattern."),
        ("*.rs", "No files found matching pattern."),
    ],
)
async def test_patterns(tree: Workspace, pattern: str, expected: str) -> None:
    assert await tree.text("glob", pattern=pattern) == expected


async def test_paths_are_formatted_like_the_argument(tree: Workspace) -> None:
    assert await tree.text("glob", pattern="*.py", path="src") == "src/c.py"
    full = tree.sandbox.resolve_path("src")
    assert await tree.text("glob", pattern="*.py", path=full) == f"{full}/c.py"
    assert await tree.text("glob", pattern=f"{full}/*.py") == "src/c.py"
    root = tree.sandbox.resolve_path(".")
    assert await tree.text("glob", pattern="../*.py", path="src") == f"{root}/a.py"


async def test_missing_directory_is_an_error(tree: Workspace) -> None:
    assert "no such file" in await tree.error("glob", pattern="*", path="none")


async def test_file_as_directory_is_an_error(tree: Workspace) -> None:
    error = await tree.error("glob", pattern="*", path="a.py")
    assert "not a directory" in error
    assert "the name as pattern" in error


async def test_at_most_1000_files_are_shown(host: Workspace, tmp_path: Path) -> None:
    for number in range(1002):
        (tmp_path / f"{number:04}").touch()
    text = await host.text("glob", pattern="*")
    assert text.startswith("0000\n0001\n")
    assert text.endswith("0999\n\n[Showing 1000 of 1002 files. Narrow the pattern or path.]")


async def test_long_names_count_towards_the_limit(host: Workspace, tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:04}{'x' * 240}").touch()
    text = await host.text("glob", pattern="*")
    assert len(text.encode()) < 51200 + 100
    assert "of 300 files" in text


async def test_path_with_line_break_is_quoted(host: Workspace, tmp_path: Path) -> None:
    (tmp_path / "a\nb").touch()
    assert await host.text("glob", pattern="a*") == '"a\\nb"'


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.py", "a.py", True),
        ("*.py", "src/deep/a.py", True),
        ("*.py", "a.pyc", False),
        ("*", ".env", True),
        ("src/*.py", "src/a.py", True),
        ("src/*.py", "src/deep/a.py", False),
        ("./src/*.py", "src/a.py", True),
        ("src/**/*.py", "src/a.py", True),
        ("src/**/*.py", "src/x/y/a.py", True),
        ("**/test_*", "tests/test_a.py", True),
        ("**/**/a", "a", True),
        ("src/", "src/x/a", True),
        ("src/**", "lib/a", False),
        ("[ab].txt", "a.txt", True),
        ("[!ab].txt", "a.txt", False),
        ("A.txt", "a.txt", False),
    ],
)
def test_pattern_matches_path(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected
